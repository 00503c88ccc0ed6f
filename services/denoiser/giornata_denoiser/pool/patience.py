"""How long a leader waits for its ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankTimeouts:
    """Limits in seconds; a step's are counted from its beginning."""

    late: tuple[float, float] = (3.0, 1.0)
    """A step that takes so many times as long as predicted and so much more has its ranks asked whether they run."""
    ping_s: float = 3.0
    """A rank that does not answer within so long is stalled: it is killed."""
    hung: tuple[float, float] = (30.0, 60.0)
    """A step that takes so many times as long and so much more never ends: its ranks are killed, answer or not."""
    load_s: float = 1800.0
    """A rank that has not loaded its model by then is killed."""
    again_s: tuple[float, ...] = (0.0, 1.0, 5.0, 15.0, 30.0)
    """How long after its end a rank is started again, by how often it has ended without a step since; beyond, it is
    given up."""

    def late_s(self, seconds: float) -> float:
        """After how long a step that was predicted to take `seconds` is late."""
        return self.late[0] * seconds + self.late[1]

    def hung_s(self, seconds: float) -> float:
        """Likewise."""
        return self.hung[0] * seconds + self.hung[1]
