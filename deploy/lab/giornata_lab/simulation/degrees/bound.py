"""How many deadlines any rule could keep: a mixed-integer program that knows all arrivals.

It relaxes what makes the choice hard: steps are fluid, degrees change at any moment and cost nothing, and any devices
can compute together. Time is cut at arrivals and deadlines. For each task, interval and efficient degree the program
chooses for how long the task has that degree. A task counts where all its steps are done by its deadline.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from giornata.scheduling.degrees.plans import DegreeFrontier, degree_frontier
from giornata.scheduling.degrees.pool import Times

EPS = 1e-9
ROUNDING = 1e-6
"""Rounding allowed for in the solver's optimum, which is a whole number."""


@dataclass(frozen=True, slots=True)
class FluidTask:
    """A row as the program sees it."""

    arrived_s: float
    due_s: float
    """Finite: of rows without deadlines there is nothing to keep."""
    steps: int
    step_s: Times


def most_in_time(tasks: Sequence[FluidTask], devices: int, *, limit_s: float = math.inf) -> int:
    """The most of `tasks` that end in time on so many devices; no schedule keeps more.

    Tasks that share no time with others are separate programs. One that takes longer than `limit_s` gives the upper
    bound that it has reached.

    Raises:
        ValueError: a task has no deadline, or no degree that the pool has.
    """
    kept = 0
    for group in _groups([task for task in tasks if _possible(task, devices)]):
        kept += 1 if len(group) == 1 else _Program(group, devices).most(limit_s)
    return kept


def _possible(task: FluidTask, devices: int) -> bool:
    if not math.isfinite(task.due_s):
        raise ValueError(f"a task of the bound has a deadline; received due_s={task.due_s}")
    return task.steps * degree_frontier(task.step_s, devices).fastest_s <= task.due_s - task.arrived_s + EPS


def _groups(tasks: Sequence[FluidTask]) -> Iterator[list[FluidTask]]:
    """Tasks whose times from arrival to deadline hang together."""
    group: list[FluidTask] = []
    reach = -math.inf
    for task in sorted(tasks, key=lambda task: task.arrived_s):
        if group and task.arrived_s >= reach:
            yield group
            group = []
        group.append(task)
        reach = max(reach, task.due_s)
    if group:
        yield group


@dataclass
class _Constraints:
    """Sparse rows `low <= sum(value * variable) <= high`."""

    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def add(self, terms: Sequence[tuple[int, float]], low: float, high: float) -> None:
        self.rows += [len(self.low)] * len(terms)
        self.columns += [column for column, _ in terms]
        self.values += [value for _, value in terms]
        self.low.append(low)
        self.high.append(high)

    def matrix(self, variables: int) -> LinearConstraint:
        entries = (self.values, (self.rows, self.columns))
        return LinearConstraint(
            coo_array(entries, shape=(len(self.low), variables)).tocsr(), self.low, self.high
        )


class _Program:
    """The program of one group. Its first variables are 1 for a task that counts; the others are seconds."""

    def __init__(self, tasks: Sequence[FluidTask], devices: int) -> None:
        self._tasks, self._devices = tasks, devices
        self._frontiers: list[DegreeFrontier] = [degree_frontier(task.step_s, devices) for task in tasks]
        cuts = sorted({task.arrived_s for task in tasks} | {task.due_s for task in tasks})
        self._spans = list(pairwise(cuts))
        self._columns: dict[tuple[int, int, int], int] = {}
        for index, task in enumerate(tasks):
            for span, (begin, end) in enumerate(self._spans):
                if begin >= task.arrived_s and end <= task.due_s:
                    for rung in range(len(self._frontiers[index].rungs)):
                        self._columns[index, span, rung] = len(tasks) + len(self._columns)

    def most(self, limit_s: float) -> int:
        tasks, variables = len(self._tasks), len(self._tasks) + len(self._columns)
        counted = np.arange(variables) < tasks
        solved = milp(
            np.where(counted, -1.0, 0.0),
            constraints=self._constraints().matrix(variables),
            integrality=counted.astype(int),
            bounds=Bounds(0, np.where(counted, 1.0, np.inf)),
            options={"time_limit": limit_s} if math.isfinite(limit_s) else {},
        )
        least = solved.mip_dual_bound
        return tasks if least is None else min(tasks, math.floor(-least + ROUNDING))

    def _constraints(self) -> _Constraints:
        """A task that counts has all its steps, and one degree at a time; no more devices compute than there are."""
        found = _Constraints()
        steps: list[list[tuple[int, float]]] = [[] for _ in self._tasks]
        alone: dict[tuple[int, int], list[tuple[int, float]]] = {}
        held: list[list[tuple[int, float]]] = [[] for _ in self._spans]
        for (task, span, rung), column in self._columns.items():
            chosen = self._frontiers[task].rungs[rung]
            steps[task].append((column, chosen.rate))
            alone.setdefault((task, span), []).append((column, 1.0))
            held[span].append((column, chosen.degree))
        for index, task_ in enumerate(self._tasks):
            found.add([*steps[index], (index, -float(task_.steps))], 0.0, np.inf)
        for (_, span), terms in alone.items():
            found.add(terms, -np.inf, self._length(span))
        for span, terms in enumerate(held):
            found.add(terms, -np.inf, self._devices * self._length(span))
        return found

    def _length(self, span: int) -> float:
        begin, end = self._spans[span]
        return end - begin
