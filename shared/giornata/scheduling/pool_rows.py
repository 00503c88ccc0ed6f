"""The rows of one pool as the router knows them, what their steps take by degree, and when they end. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Final, NamedTuple

from giornata.planning.cost_model import ALONE, HALVED, StepParallelism, refresh_interval
from giornata.scheduling.degrees.plans import (
    EPS,
    FreeDeviceSpans,
    PackingRequest,
    make_candidate,
    pack_deadlines,
)
from giornata.scheduling.degrees.pool import Devices, PoolRow, Times, device_subsets
from giornata.scheduling.demand import (
    JobDemand,
    PlacementEstimate,
    RowShape,
    StepTimeModel,
    WorkerLoad,
    is_reusing,
    remaining_steps,
    shape_of,
)
from giornata.wire.values import BlockMode
from giornata.wire.workers import RowProgress

GUIDED: Final = 2
"""Sequences of a row with true classifier-free guidance: the only one that has halves."""
REMEMBERED: Final = 4096
"""How many sizes' times are kept."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """The size of a row's steps, as far as their time depends on it: the `size` of a :class:`PoolRow`."""

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
        """Return whether its first step on other devices is computed in full.

        What it takes is corrected by, or made in, a step in full on the same devices.
        """
        return not self.corrected and (self.reuses or self.renewed_every > 0)


class RowTimes(NamedTuple):
    """The times of a :class:`PoolRow`, in seconds, and the size that they are of."""

    step_s: Times
    moved_s: Times
    size: Hashable


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
            known = RowTimes(self._times(size, moved=False), self._times(size, moved=True), size)
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
        return {
            degree: min(_step_ms(self._paces[way], (size,), (moved,)) for way in ways) / 1e3
            for degree in dict.fromkeys(way.degree for way in self._paces)
            if (ways := self._usable(degree, (size,)))
        }

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
    rows = list(zip(sizes, moved or (False,) * len(sizes), strict=True))
    forwards = 1
    if pace.operations.together:
        # Rows in full of each picture size are a forward, and those that take another one.
        whole = {size.shape.image for size, there in rows if _whole(size, moved=there)}
        forwards = len(whole) + any(not _whole(size, moved=there) for size, there in rows)
    return forwards * pace.base_ms + sum(_row_ms(pace, size, moved=there) for size, there in rows)


def _whole(size: StepSize, *, moved: bool) -> bool:
    """Return whether the step computes all tokens of its picture."""
    return (moved and size.pays) or not (size.reuses or size.renewed_every)


def _row_ms(pace: StepTimeModel, size: StepSize, *, moved: bool) -> float:
    """Return what a row adds to a step; a moved one computes its prefix again, and all of its picture where it pays."""
    shape = size.shape
    joining_ms = pace.row_ms(shape.joining, BlockMode.FULL) if moved and shape.prefix else 0.0
    if moved and size.pays:
        return joining_ms + pace.row_ms(shape.whole, BlockMode.FULL)
    load = shape.load(pace, reuses=size.reuses, renewed_every=size.renewed_every)
    return joining_ms + load.step_ms


class PoolRows:
    """Makes the rows of a pool whose steps have this pace.

    Args:
        pace: what steps cost there.
        devices: that compute; more than one.
    """

    def __init__(self, pace: StepTimeModel, devices: int) -> None:
        self.pace, self.devices = pace, devices
        self._times = times_at(pace)

    def of(
        self, listed: Sequence[RowProgress], demand: JobDemand | None, templates: Collection[str], place: int
    ) -> tuple[PoolRow, ...]:
        """The rows of one attempt, as far as they are `listed`, and as the `demand` says where there is one.

        `templates` are those that the pool has, `place` is the place of the first row in the order of all.
        """
        if demand is None:
            return tuple(self._listed(row, place + number) for number, row in enumerate(listed))
        asked = self.asked(demand, templates, place)
        told = next((row.due_ms for row in listed if row.due_ms is not None), None)
        return asked if told is None else tuple(replace(row, due_s=told / 1e3) for row in asked)

    def asked(self, demand: JobDemand, templates: Collection[str], place: int = 0) -> tuple[PoolRow, ...]:
        """The rows of a demand that has not begun here."""
        hit = demand.template is not None and demand.template in templates
        most = self.pace.renewed_every if demand.renews and not hit else 0
        due_s = math.inf if demand.within_ms is None else demand.within_ms / 1e3
        sizes = (
            StepSize.of(
                self.pace.controlled(shape, demand.controls),
                reuses=hit,
                renewed_every=refresh_interval(shape.steps, most),
                corrected=shape.begun,
            )
            for shape in demand.shapes
        )
        return tuple(
            self._row(size, shape.steps, due_s, place + number)
            for number, (shape, size) in enumerate(zip(demand.shapes, sizes, strict=True))
        )

    def _listed(self, row: RowProgress, place: int) -> PoolRow:
        size = StepSize.of(
            shape_of(row),
            reuses=is_reusing(row),
            renewed_every=row.renewed_every,
            corrected=row.begun and not row.step,
        )
        due_s = math.inf if row.due_ms is None else row.due_ms / 1e3
        return self._row(
            size, remaining_steps(row), due_s, place, tuple(range(min(row.degree, self.devices)))
        )

    def _row(self, size: StepSize, left: int, due_s: float, place: int, devices: Devices = ()) -> PoolRow:
        times = self._times.of(size)
        return PoolRow(place, 0.0, due_s, left, times.step_s, times.moved_s, devices, place=place, size=size)


# Deadlines are packed by the code of the pool's own rule, as if all steps in flight ended now. Ends are
# those of a virtual run: rows in the rule's order share the devices evenly, each at the quickest degree
# that its share allows.


NOW_S: Final = 0.0
"""Times of rows here count from now."""
LAST: Final = math.inf


class PoolFinishEstimator:
    """A pool with all its rows, prepared to be asked what becomes of it with more.

    Args:
        devices: that compute, of one machine.
        rows: of the pool, those that run first; `place` is their order, and times count from now.
        backlog: the same rows, as if one device had them: what of a worker depends on that alone.
    """

    def __init__(self, devices: int, rows: Sequence[PoolRow], backlog: WorkerLoad) -> None:
        self.backlog = backlog
        self._devices, self._rows = devices, tuple(rows)
        self._there = frozenset(range(devices))
        self._degrees = frozenset(map(len, device_subsets(devices)))
        self._asked: tuple[Sequence[PoolRow], float, PlacementEstimate] | None = None
        """The latest question and its answer: a policy may ask twice."""

    @cached_property
    def ends_ms(self) -> list[float]:
        """Return when each row leaves, in the order of the rows, in ms from now."""
        return self._ends(self._rows, self._quickest, self._kept)

    @property
    def drained_ms(self) -> float:
        """Time until all rows have left."""
        return max(self.ends_ms, default=0.0)

    def predict(self, joining: Sequence[PoolRow], ready_ms: float = 0.0) -> PlacementEstimate:
        """Return what happens if a job's rows, at least one, join last, and can begin only so long from now.

        A row whose deadline is kept is not delayed, however much later it ends.
        """
        if self._asked is None or self._asked[0] is not joining or self._asked[1] != ready_ms:
            self._asked = joining, ready_ms, self._predicted(joining, ready_ms)
        return self._asked[2]

    def _predicted(self, joining: Sequence[PoolRow], ready_ms: float) -> PlacementEstimate:
        ready = [
            replace(row, key=(self, number), place=LAST, until_s=ready_ms / 1e3 if ready_ms else None)
            for number, row in enumerate(joining)
        ]
        promised = any(row.promised for row in ready)
        kept = self._packed((*self._wishes, *self._wished(ready))) if promised else self._kept
        quickest = [_quickest(row.step_s, self._devices) for row in ready]
        ends = self._ends((*self._rows, *ready), (*self._quickest, *quickest), kept)
        count, gained = len(ready), None
        if promised:
            in_time = all(row.key in kept for row in ready)
            gained = count - len(self._kept - kept) if in_time else 0
        finish_ms = max(ends[-count:]) + ready_ms
        if gained and gained > 0:
            finish_ms = min(finish_ms, max(row.due_s for row in ready) * 1e3)
        delays = (
            later - before
            for row, before, later in zip(self._rows, self.ends_ms, ends, strict=False)
            if row.key not in kept
        )
        return PlacementEstimate(finish_ms, max(0.0, sum(delays)), ready_ms, gained)

    @cached_property
    def _kept(self) -> frozenset[Hashable]:
        """Rows whose deadlines are kept without the job."""
        return self._packed(self._wishes)

    @cached_property
    def _wishes(self) -> list[PackingRequest]:
        return self._wished(self._rows)

    @cached_property
    def _quickest(self) -> list[list[float]]:
        """Seconds of each row's step by the number of free devices; see :func:`_quickest`."""
        return [_quickest(row.step_s, self._devices) for row in self._rows]

    def _wished(self, rows: Sequence[PoolRow]) -> list[PackingRequest]:
        """Return what rows that can be in time ask for."""
        found = (make_candidate(row, self._degrees, self._there) for row in rows if row.promised)
        return [each.wish(NOW_S) for each in found if each is not None and not each.hopeless(NOW_S)]

    def _packed(self, wishes: Sequence[PackingRequest]) -> frozenset[Hashable]:
        return frozenset(pack_deadlines(wishes, FreeDeviceSpans.of(NOW_S, self._devices, ())))

    def _ends(
        self, rows: Sequence[PoolRow], quickest: Sequence[Sequence[float]], kept: Collection[Hashable]
    ) -> list[float]:
        """Return when each row leaves, in ms: first those in time by deadline, then others in their order."""

        def turn(number: int) -> tuple[bool, bool, float, float]:
            row = rows[number]
            timely = row.key in kept
            return row.background, not timely, row.due_s if timely else 0.0, row.place

        waiting = sorted(range(len(rows)), key=turn, reverse=True)
        left = [row.left + _extra(row) for row in rows]
        ends, active, now_s = [0.0] * len(rows), list[int](), NOW_S
        while waiting or active:
            while waiting and len(active) < self._devices:
                active.append(waiting.pop())
            share = self._devices // len(active)
            took_s = min(left[number] * quickest[number][share] for number in active)
            now_s += took_s
            staying = []
            for number in active:
                left[number] -= took_s / quickest[number][share]
                if left[number] > EPS:
                    staying.append(number)
                else:
                    ends[number] = now_s * 1e3
            active = staying
        return ends


def alone_ms(row: PoolRow, devices: int) -> float:
    """Time of all steps of a row that has a pool of so many devices for itself."""
    return 1e3 * (row.left + _extra(row)) * _quickest(row.step_s, devices)[devices]


def share_ms(row: PoolRow, devices: int) -> float:
    """Time that a row takes of a pool of so many devices that always has others to compute."""
    work_s = min(degree * seconds for degree, seconds in row.step_s.items() if degree <= devices)
    return 1e3 * (row.left + _extra(row)) * work_s / devices


def _quickest(times: Times, devices: int) -> list[float]:
    """Seconds of a step by the number of devices that are free for it; the first entry is unused."""
    found = [math.inf] * (devices + 1)
    for degree, seconds in times.items():
        if degree <= devices:
            found[degree] = seconds
    return list(accumulate(found, min))


def _extra(row: PoolRow) -> float:
    """Return what its first step here takes longer than the others, in steps."""
    if row.devices:
        return 0.0
    degree = min(row.step_s)
    return max(0.0, row.moved_s[degree] / row.step_s[degree] - 1)
