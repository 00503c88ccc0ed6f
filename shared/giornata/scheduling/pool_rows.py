"""The rows of one pool as the router knows them: by telemetry, by what was assigned, and by what a job asks. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from giornata.planning.costs import renewed_every
from giornata.scheduling.degree_times import StepSize, times_at
from giornata.scheduling.degrees.pool import Devices, PoolRow
from giornata.scheduling.degrees.subsets import MOST_DEVICES
from giornata.scheduling.demand import JobDemand, StepTimeModel
from giornata.scheduling.progress import left_of, reuses, shape_of
from giornata.wire.workers import RankPhase, RowProgress, WorkerState


def devices_of(shown: WorkerState) -> int:
    """Devices of a worker that compute; 1 of one that is no pool."""
    able = sum(rank.phase is RankPhase.READY for rank in shown.ranks)
    return min(MOST_DEVICES, max(1, able))


def pool_of(pace: StepTimeModel, shown: WorkerState, before: PoolRows | None = None) -> PoolRows | None:
    """What makes the rows of a worker; None where one device computes. `before` was made for the same pace."""
    devices = devices_of(shown)
    if devices == 1:
        return None
    return before if before is not None and before.devices == devices else PoolRows(pace, devices)


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
                renewed_every=renewed_every(shape.steps, most),
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
            reuses=reuses(row),
            renewed_every=row.renewed_every,
            corrected=row.begun and not row.step,
        )
        due_s = math.inf if row.due_ms is None else row.due_ms / 1e3
        return self._row(size, left_of(row), due_s, place, tuple(range(min(row.degree, self.devices))))

    def _row(self, size: StepSize, left: int, due_s: float, place: int, devices: Devices = ()) -> PoolRow:
        times = self._times.of(size)
        return PoolRow(place, 0.0, due_s, left, times.step_s, times.moved_s, devices, place=place, size=size)
