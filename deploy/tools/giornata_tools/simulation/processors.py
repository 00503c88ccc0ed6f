"""Processors that simulated processes share. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from giornata_tools.simulation.clock import Action, Clock

EPSILON_S: Final = 1e-9
"""Work below this is done."""


@dataclass(slots=True, eq=False)
class _Task:
    left_s: float
    then: Action


class Processors:
    """One machine's processors, which all tasks share evenly at every moment; no task has more than one.

    Args:
        clock: tells the time.
        cores: number of processors; infinite: every task has one.
    """

    def __init__(self, clock: Clock, cores: float = math.inf) -> None:
        self._clock, self._cores = clock, cores
        self._tasks: list[_Task] = []
        self._since_s = 0.0
        self._plans = 0
        """Plans made so far; the latest one is in force."""

    @property
    def crowded(self) -> bool:
        """Whether tasks may slow each other down, so that their ends are unknown when they begin."""
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
