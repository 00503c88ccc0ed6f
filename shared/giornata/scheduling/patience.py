"""When a worker's step has taken so long that it probably does not end. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from giornata.scheduling.backlog import WorkerLoad


@dataclass(frozen=True)
class StallTimeout:
    """A worker is stalled whose step takes longer than `least_ms`, and than `factor` times its predicted time."""

    factor: float = 10.0
    least_ms: float = 10_000.0

    def allows(self, stepping_ms: float, step_ms: float) -> bool:
        """Whether a step that has taken `stepping_ms`, and was predicted to take `step_ms`, may still end."""
        return stepping_ms <= max(self.least_ms, self.factor * step_ms)


def next_step_ms(backlog: WorkerLoad) -> float:
    """The longest that the next step of all running rows takes: each of them makes its first one."""
    return backlog.base_ms + sum(row.step_ms + row.first_ms for row in backlog.running)
