"""A virtual clock, and processors and servers that compute by it. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Final

EPSILON_S: Final = 1e-9
"""Work below this is done."""
Action = Callable[[float], None]
"""Called with the time at which it runs, in seconds."""


class SimClock:
    """Runs actions in order of time, and at equal times in the order in which they were planned; starts at 0."""

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


@dataclass(slots=True, eq=False)
class _Task:
    left_s: float
    then: Action


class Processors:
    """One machine's processors, which all tasks share evenly at every moment; no task has more than one."""

    def __init__(self, clock: SimClock, cores: float = math.inf) -> None:
        self._clock, self._cores = clock, cores
        self._tasks: list[_Task] = []
        self._since_s = 0.0
        self._plans = 0
        """Plans made so far; the latest one is in force."""

    @property
    def crowded(self) -> bool:
        """Return whether tasks may slow each other down, so that their ends are unknown when they begin."""
        return math.isfinite(self._cores)

    def compute(self, seconds: float, now: float, then: Action) -> None:
        """Run `then` when a task has ended that takes so long alone."""
        if not self.crowded:
            self._clock.at(now + seconds, then)
            return
        self._advance(now)
        self._tasks.append(_Task(seconds, then))
        self._plan(now)

    @property
    def _pace(self) -> float:
        return min(1.0, self._cores / len(self._tasks)) if self._tasks else 1.0

    def _advance(self, now: float) -> None:
        done_s = (now - self._since_s) * self._pace
        for task in self._tasks:
            task.left_s -= done_s
        self._since_s = now

    def _plan(self, now: float) -> None:
        """Plan for the end of the first task, if no other begins before."""
        self._plans = number = self._plans + 1
        if self._tasks:
            soonest_s = max(0.0, min(task.left_s for task in self._tasks)) / self._pace
            self._clock.at(now + soonest_s, lambda then: self._due(number, then))

    def _due(self, number: int, now: float) -> None:
        if number != self._plans:
            return
        self._advance(now)
        done = [task for task in self._tasks if task.left_s <= EPSILON_S]
        self._tasks = [task for task in self._tasks if task.left_s > EPSILON_S]
        self._plan(now)
        for task in done:
            task.then(now)


class StageServers:
    """The servers of a stage, which compute on `host`, and one queue before them: first come, first served."""

    def __init__(self, servers: int, host: Processors) -> None:
        self._free, self._host = servers, host
        self._waiting: deque[tuple[float, Action]] = deque()

    def serve(self, seconds: float, now: float, then: Action) -> None:
        """Run `then` when a server has done work that takes so long alone; at once where there is none."""
        if not seconds:
            then(now)
        elif self._free:
            self._free -= 1
            self._host.compute(seconds, now, lambda ended: self._served(then, ended))
        else:
            self._waiting.append((seconds, then))

    def _served(self, then: Action, now: float) -> None:
        self._free += 1
        if self._waiting:
            seconds, following = self._waiting.popleft()
            self.serve(seconds, now, following)
        then(now)
