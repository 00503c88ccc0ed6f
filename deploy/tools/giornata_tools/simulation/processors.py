"""Processors that simulated processes share where there are fewer of them than processes. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from giornata_tools.simulation.clock import Action, Clock

EPSILON_S: Final = 1e-9
"""So little work is none."""


@dataclass(slots=True, eq=False)
class _Task:
    left_s: float
    then: Action


class Processors:
    """One machine's processors. All who compute share them evenly at every moment, and nobody has more than one.

    Args:
        clock: on which it computes.
        cores: infinite: everyone has one.
    """

    def __init__(self, clock: Clock, cores: float = math.inf) -> None:
        self._clock, self._cores = clock, cores
        self._tasks: list[_Task] = []
        self._since_s = 0.0
        self._plans = 0
        """Made so far; the latest one is in force."""

    @property
    def crowded(self) -> bool:
        """Whether processes may slow each other down, so that nobody knows when he will be done."""
        return math.isfinite(self._cores)

    def compute(self, seconds: float, now: float, then: Action) -> None:
        """Run `then` when somebody has computed what takes so long alone."""
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
        """For the first one to be done, if nobody else comes before that."""
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
