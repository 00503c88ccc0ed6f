"""A row as a decision sees it: its degrees in this pool, what a move costs it, and whether it can be in time. Pure."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import lru_cache

from giornata.scheduling.degrees.frontier import EPS, DegreeFrontier, frontier
from giornata.scheduling.degrees.packing import PackingOption, PackingRequest
from giornata.scheduling.degrees.pool import Devices, PoolRow, Times
from giornata.wire.jobs import Priority

_SHAPES = 4096
"""Shapes that are remembered."""


@dataclass(frozen=True, slots=True)
class RowDegreeTimes:
    """Times of a row's steps by the degrees that this pool has now."""

    step_s: Times
    moved_s: Times
    ladder: DegreeFrontier
    pays: bool
    """Whether a move costs anything."""
    extra: float
    """What its first step here, or a move, takes longer, in steps."""
    fastest: int
    """The degree of the shortest step."""

    def least_s(self, steps: int, kept: int) -> float:
        """Least seconds of so many steps, where degree `kept`, 0 for none, needs no move."""
        fastest_s = self.ladder.fastest_s
        if not self.pays:
            return steps * fastest_s
        moving_s = min(self.moved_s.values()) + (steps - 1) * fastest_s
        return min(moving_s, steps * self.step_s[kept]) if kept else moving_s


@lru_cache(maxsize=_SHAPES)
def _shape(
    step_s: tuple[tuple[int, float], ...],
    moved_s: tuple[tuple[int, float], ...],
    degrees: frozenset[int],
    devices: int,
) -> RowDegreeTimes:
    steps = {degree: seconds for degree, seconds in step_s if degree in degrees}
    moves = steps | {degree: seconds for degree, seconds in moved_s if degree in steps}
    ladder = frontier(steps, devices)
    cheapest = ladder.rungs[0]
    extra = (moves[cheapest.degree] - steps[cheapest.degree]) * cheapest.rate
    pays = any(moves[degree] > seconds + EPS for degree, seconds in steps.items())
    return RowDegreeTimes(steps, moves, ladder, pays, extra, min(steps, key=steps.__getitem__))


@dataclass(frozen=True, slots=True)
class CandidateRow:
    """A row with its shape in a pool of so many devices."""

    row: PoolRow
    shape: RowDegreeTimes
    kept: int
    """The degree that needs no move; 0 for none."""
    devices: int

    @property
    def work_s(self) -> float:
        """Device-seconds that its steps take at the least."""
        return self.row.left * self.shape.ladder.work_s

    @property
    def stays(self) -> bool:
        """Whether it has begun on devices that it pays to leave."""
        return self.shape.pays and self.kept > 0

    def step_s(self, degree: int) -> float:
        """Seconds of its next step at this degree."""
        return (self.shape.step_s if degree == self.kept else self.shape.moved_s)[degree]

    def step_on_s(self, devices: Devices) -> float:
        """Seconds of its next step on these devices."""
        own = self.kept and devices == self.row.devices
        return (self.shape.step_s if own else self.shape.moved_s)[len(devices)]

    def start_s(self, now_s: float) -> float:
        """When it can begin a step."""
        return now_s if self.row.until_s is None else max(now_s, self.row.until_s)

    def hopeless(self, now_s: float) -> bool:
        """Whether it is late however many devices it has; a row without deadline is not."""
        least_s = self.shape.least_s(self.row.left, self.kept) if self.row.left else 0.0
        return self.start_s(now_s) + least_s > self.row.due_s + EPS

    def wish(self, now_s: float) -> PackingRequest:
        """What it asks of packing: to stay as it is, where a move costs something, else any mixture of degrees."""
        shape, left = self.shape, self.row.left
        ways = [PackingOption(left + shape.extra if shape.pays else left, shape.ladder)]
        if self.stays:
            ways.insert(0, PackingOption(left, frontier({self.kept: shape.step_s[self.kept]}, self.devices)))
        return PackingRequest(
            self.row.key,
            self.start_s(now_s),
            self.row.due_s,
            tuple(ways),
            self.work_s,
            self.row.priority is Priority.BATCH,
            self.stays,
        )


def candidate(row: PoolRow, degrees: AbstractSet[int], there: AbstractSet[int]) -> CandidateRow | None:
    """`row` with those of its degrees that the pool has; None where there are none.

    A template run has its narrowest degree alone. A row keeps nothing of devices that are not `there` any more.
    """
    able = row.step_s.keys() & degrees
    if not able:
        return None
    if row.background:
        able = {min(able)}
    shape = _shape(tuple(row.step_s.items()), tuple(row.moved_s.items()), frozenset(able), len(there))
    kept = len(row.devices) if there >= set(row.devices) else 0
    return CandidateRow(row, shape, kept if kept in able else 0, len(there))
