"""What becomes of a pool's rows with a job and without it: which deadlines are kept, and when rows end. Pure.

Deadlines are packed by the code of the pool's own rule, as if all steps in flight ended now. Ends are those of a
virtual run: rows in the rule's order share the devices evenly, each at the quickest degree that its share allows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Final

from giornata.scheduling.backlog import PlacementEstimate, WorkerLoad
from giornata.scheduling.degrees.candidates import candidate
from giornata.scheduling.degrees.frontier import EPS
from giornata.scheduling.degrees.packing import PackingRequest, pack
from giornata.scheduling.degrees.pool import PoolRow, Times
from giornata.scheduling.degrees.spans import FreeDeviceSpans
from giornata.scheduling.degrees.subsets import family

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
        self._degrees = frozenset(map(len, family(devices)))
        self._asked: tuple[Sequence[PoolRow], float, PlacementEstimate] | None = None
        """The latest question and its answer: a policy may ask twice."""

    @cached_property
    def ends_ms(self) -> list[float]:
        """When each row leaves, in the order of the rows, in ms from now."""
        return self._ends(self._rows, self._quickest, self._kept)

    @property
    def drained_ms(self) -> float:
        """Time until all rows have left."""
        return max(self.ends_ms, default=0.0)

    def predict(self, joining: Sequence[PoolRow], ready_ms: float = 0.0) -> PlacementEstimate:
        """What happens if a job's rows, at least one, join last, and can begin only so long from now.

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
        """What rows that can be in time ask for."""
        found = (candidate(row, self._degrees, self._there) for row in rows if row.promised)
        return [each.wish(NOW_S) for each in found if each is not None and not each.hopeless(NOW_S)]

    def _packed(self, wishes: Sequence[PackingRequest]) -> frozenset[Hashable]:
        return frozenset(pack(wishes, FreeDeviceSpans.of(NOW_S, self._devices, ())))

    def _ends(
        self, rows: Sequence[PoolRow], quickest: Sequence[Sequence[float]], kept: Collection[Hashable]
    ) -> list[float]:
        """When each row leaves, in ms: first those in time by deadline, then others in their order."""

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
    """What its first step here takes longer than the others, in steps."""
    if row.devices:
        return 0.0
    degree = min(row.step_s)
    return max(0.0, row.moved_s[degree] / row.step_s[degree] - 1)
