"""A virtual clock: actions run in order of time, and at equal times in the order in which they were planned. Pure."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

Action = Callable[[float], None]
"""Called with the time at which it runs, in seconds."""


class Clock:
    """Starts at 0."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Action]] = []
        self._numbers = count()

    def at(self, time_s: float, action: Action) -> None:
        """Plan `action`, not before now."""
        heappush(self._due, (max(time_s, self.now), next(self._numbers), action))

    def step(self) -> bool:
        """Run the next action; False where there is none."""
        if not self._due:
            return False
        self.now, _, action = heappop(self._due)
        action(self.now)
        return True
