"""What steps of a pool's rows take by degree: of each row alone, on changed devices, and of rows that share one. Pure.

The leader of a pool, the router and the simulator ask the same code, so that they see the same deadlines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, NamedTuple

from giornata.planning.degrees import ALONE, HALVED, StepParallelism
from giornata.scheduling.degrees.pool import PoolRow, Times
from giornata.scheduling.demand import RowShape, StepTimeModel
from giornata.wire.values import BlockMode

GUIDED: Final = 2
"""Sequences of a row with true classifier-free guidance: the only one that has halves."""
REMEMBERED: Final = 4096
"""How many sizes' times are kept."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """What a row's steps compute, as far as their time depends on it: the `size` of a :class:`PoolRow`."""

    shape: RowShape
    """As of a row that has begun, with one step left: neither counts here; see :meth:`of`."""
    reuses: bool = False
    """Whether it takes from a template."""
    renewed_every: int = 0
    """Without a template: one step in so many is computed in full, and the others take from it; 0: all are in full."""
    corrected: bool = False
    """It takes from a template and knows the correction from the start: no step has to be computed in full."""

    @classmethod
    def of(
        cls, shape: RowShape, *, reuses: bool = False, renewed_every: int = 0, corrected: bool = False
    ) -> StepSize:
        """The size of a row of this shape; equal for rows that differ in what is left alone."""
        alike = replace(shape, steps=1, begun=True)
        if shape.computed >= shape.image:
            return cls(alike)
        return cls(alike, reuses, 0 if reuses else renewed_every, reuses and corrected)

    @property
    def pays(self) -> bool:
        """Whether its first step on other devices is computed in full.

        What it takes is corrected by, or made in, a step in full on the same devices.
        """
        return not self.corrected and (self.reuses or self.renewed_every > 0)


class RowTimes(NamedTuple):
    """The times of a :class:`PoolRow`, in seconds."""

    step_s: Times
    moved_s: Times


class DegreeTimes:
    """The times of one pool's steps, by what they cost now.

    Args:
        pace: the pool's: costs of one device, and those of several by way. A degree without costs is not used.
        rows: most rows that share a step.
        tokens: most text and image tokens that they compute; a row alone may have more.
    """

    def __init__(self, pace: StepTimeModel, rows: int = 1 << 30, tokens: float = math.inf) -> None:
        self._paces = {ALONE: pace, **pace.spread}
        self._rows, self._tokens = rows, tokens
        self._known: dict[StepSize, RowTimes] = {}

    def of(self, size: StepSize) -> RowTimes:
        """Seconds of a row's step alone, by degree; of two ways of one degree, those of the quicker one."""
        known = self._known.get(size)
        if known is None:
            known = RowTimes(self._times(size, moved=False), self._times(size, moved=True))
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[size] = known
        return known

    def together(self, rows: Sequence[PoolRow], degree: int) -> float | None:
        """Seconds of a step of rows whose sizes are :class:`StepSize`; see :class:`.pool.Together`.

        None where they are more rows or tokens than may share a step, or the degree has no costs.
        """
        sizes = [row.size for row in rows if isinstance(row.size, StepSize)]
        if len(sizes) < len(rows) or len(rows) > self._rows or self._computed(sizes) > self._tokens:
            return None
        took = [_step_ms(self._paces[way], sizes) for way in self._usable(degree, sizes)]
        return min(took) / 1e3 if took else None

    def halves(self, sizes: Sequence[StepSize], moved: Sequence[bool] = ()) -> bool:
        """Whether two devices are quicker on a step of these rows where one computes the unconditional sequences.

        `moved` says of each row whether it was on other devices before; default none.
        """
        took = {way: _step_ms(self._paces[way], sizes, moved) for way in self._usable(HALVED, sizes)}
        return bool(took) and min(took, key=took.__getitem__).halves

    def _times(self, size: StepSize, *, moved: bool) -> Times:
        found: dict[int, float] = {}
        for way in self._paces:
            if way in self._usable(way.degree, (size,)):
                took_s = _step_ms(self._paces[way], (size,), (moved,)) / 1e3
                found[way.degree] = min(took_s, found.get(way.degree, math.inf))
        return found

    def _usable(self, degree: int, sizes: Iterable[StepSize]) -> list[StepParallelism]:
        """The ways of a degree that have costs; all rows are guided where one device computes half of the sequences."""
        ways = [
            way
            for way in (StepParallelism(degree), StepParallelism(degree, halves=True))
            if way in self._paces
        ]
        guided = all(size.shape.sequences == GUIDED for size in sizes)
        return ways if guided else [way for way in ways if not way.halves]

    def _computed(self, sizes: Iterable[StepSize]) -> int:
        pace = self._paces[ALONE]
        return sum(
            size.shape.load(pace, reuses=size.reuses, renewed_every=size.renewed_every).tokens
            for size in sizes
        )


@lru_cache(maxsize=64)
def times_at(pace: StepTimeModel) -> DegreeTimes:
    """The times of all pools of one pace, without a limit to what shares a step."""
    return DegreeTimes(pace)


def _step_ms(pace: StepTimeModel, sizes: Sequence[StepSize], moved: Sequence[bool] = ()) -> float:
    """Milliseconds of a step of these rows by one pace; each is as it was told of `moved`, default none is moved."""
    marks = moved or (False,) * len(sizes)
    forwards = 1
    if (
        pace.operations.together
    ):  # rows in full of each picture size are a forward, and those that take another one
        whole = {
            size.shape.image for size, there in zip(sizes, marks, strict=True) if _whole(size, moved=there)
        }
        forwards = len(whole) + any(
            not _whole(size, moved=there) for size, there in zip(sizes, marks, strict=True)
        )
    rows_ms = sum(_row_ms(pace, size, moved=there) for size, there in zip(sizes, marks, strict=True))
    return forwards * pace.base_ms + rows_ms


def _whole(size: StepSize, *, moved: bool) -> bool:
    """Whether the step computes all tokens of its picture."""
    return (moved and size.pays) or not (size.reuses or size.renewed_every)


def _row_ms(pace: StepTimeModel, size: StepSize, *, moved: bool) -> float:
    """What a row adds to a step; a moved one computes its prefix again, and all of its picture where it pays."""
    shape = size.shape
    joining_ms = pace.row_ms(shape.joining, BlockMode.FULL) if moved and shape.prefix else 0.0
    if moved and size.pays:
        return joining_ms + pace.row_ms(shape.whole, BlockMode.FULL)
    load = shape.load(pace, reuses=size.reuses, renewed_every=size.renewed_every)
    return joining_ms + load.step_ms
