"""When jobs will have their pictures, for clients that submit them or ask; and whether they may come at all. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace

from giornata.scheduling.backlog import Computed, computed
from giornata.scheduling.demand import Demand
from giornata.scheduling.estimates import StageEstimates
from giornata.scheduling.line import Line, QueuedRows
from giornata.scheduling.placement import Placement
from giornata.scheduling.scheduler import ROW
from giornata.wire.errors import QueueTooLong
from giornata.wire.jobs import Job, Priority
from giornata.wire.messages import Forecast
from giornata.wire.workers import QueueState, ServiceName


class Forecasting:
    """Tells when jobs end; a job whose pictures were not inspected counts as the latest one of its model.

    `max_wait_s` is the longest wait that a job is accepted for.
    """

    def __init__(self, placement: Placement, line: Line, max_wait_s: float = math.inf) -> None:
        self._placement, self._line, self._max_wait_s = placement, line, max_wait_s
        self._latest: dict[str, Demand] = {}
        """The latest demand of each model, by its digest."""
        self.stages = StageEstimates()

    def learn(self, demand: Demand) -> None:
        """Remember what a job asks for whose pictures were inspected."""
        self._latest[demand.model_digest] = demand

    def queue(self, *, full: bool) -> QueueState:
        """The line as telemetry tells it; `full` where more jobs may wait to be carried at all."""
        demands = [entry.demand for entry in self._line]
        return QueueState(
            jobs=len(demands),
            rows=sum(demand.rows for demand in demands),
            steps=sum(demand.steps for demand in demands),
            full=full,
            wait_ms=None if full else self._next_wait_ms(),
            costs=tuple(self._placement.estimates.kinds()),
        )

    def admit(self, job: Job, unplaced: Collection[Job]) -> None:
        """Let a job come, behind `unplaced` ones, which are accepted and not in the line yet.

        Raises:
            QueueTooLong: its turn would not come within the longest wait, or within its own budget. How long it takes
                itself is no reason: its pictures were not inspected.
        """
        demand = self._expected(job)
        if demand is None:
            return
        before = [other for other in unplaced if _comes_first(other.priority, job.priority)]
        ahead = [entry for entry in self._line if _comes_first(entry.claim.priority, job.priority)]
        wait_ms = self._wait_ms(demand, ahead, len(before))
        limit_s = min(self._max_wait_s, job.budget_ms / 1e3)
        if wait_ms is not None and wait_ms / 1e3 > limit_s:
            raise QueueTooLong(
                "An edit that came now would wait too long.",
                received=f"{len(ahead) + len(before)} jobs before it, about {wait_ms / 1e3:.0f} s until its turn",
                accepted=f"at most {limit_s:.0f} s",
                retry_after_s=float(math.ceil(wait_ms / 1e3 - limit_s)),
            )

    def of(self, job_id: str, now: float, unplaced: Collection[Job]) -> Forecast | None:
        """The forecast of a job that is being carried; None while it is unknown."""
        finishing_ms = self.stages.finishing_ms(job_id, now)
        if finishing_ms is not None:
            return Forecast(position=0, finish_ms=finishing_ms)
        if job_id in self._line or self._placement.assigned(job_id):
            return self._of_prepared(job_id, now)
        expected = next((self._expected(job) for job in unplaced if job.job_id == job_id), None)
        found = self._computed(expected, self._line) if expected is not None else None
        if expected is None or found is None:
            return None
        prepare_ms = self.stages.prepare_ms(expected.model_digest, expected.shapes[0].image)
        # others are computed while it is prepared
        computed_ms = max(found.finish_ms, prepare_ms + found.alone_ms)
        return Forecast(position=len(self._line), finish_ms=computed_ms + self.finish_ms(expected))

    def _of_prepared(self, job_id: str, now: float) -> Forecast | None:
        """The forecast of a job with rows in the line, or at workers, or both."""
        demands = [booking.demand for booking in self._placement.assigned(job_id)]
        computed_ms, position = self._placement.finish_ms(job_id), 0
        if job_id in self._line:
            order = self._line.order(now)
            index = next(index for index, entry in enumerate(order) if entry.job_id == job_id)
            found = self._computed(order[index].demand, order[:index])
            position = 0 if demands else index
            demands.append(order[index].demand)
            computed_ms = found and max(found.finish_ms, computed_ms or 0.0)
        if computed_ms is None:
            return None
        return Forecast(position=position, finish_ms=computed_ms + sum(map(self.finish_ms, demands)))

    def finish_ms(self, demand: Demand) -> float:
        """Time that decoding and pasting all rows take."""
        return self.stages.finish_ms(demand.model_digest, demand.tokens)

    def _next_wait_ms(self) -> float | None:
        """How long one more picture would wait; None while it is unknown, and where several models are served."""
        served = {c.digest: c for s in self._placement.fleet.ready(ServiceName.DENOISER) for c in s.models}
        if len(served) != 1:
            return None
        [card] = served.values()
        latest = self._latest.get(card.digest)
        demand = Demand(card.name, card.digest, latest.shapes[:1] if latest else (ROW,))
        return self._wait_ms(demand, list(self._line))

    def _wait_ms(self, demand: Demand, ahead: Collection[QueuedRows], jobs: int = 0) -> float | None:
        """How long `demand` would wait behind others and so many jobs like it; None while it is unknown."""
        if not ahead and not jobs and self._placement.has_room(demand):
            return 0.0
        found = self._computed(demand, ahead, jobs)
        return None if found is None else found.finish_ms - found.alone_ms

    def _computed(self, demand: Demand, ahead: Iterable[QueuedRows], jobs: int = 0) -> Computed | None:
        """When `demand` is computed behind others and so many jobs like it, each piece by any worker."""
        piece, whole = demand.piece().size, demand.size
        amount = sum(entry.demand.size for entry in ahead) + jobs * whole
        return computed(self._placement.prospects(demand.piece()), amount / piece, whole / piece)

    def _expected(self, job: Job) -> Demand | None:
        latest = self._latest.get(job.model_digest)
        if latest is None:
            return None
        shape = replace(latest.shapes[0], steps=max(1, job.parameters.denoising_steps))
        return replace(latest, shapes=(shape,) * job.parameters.n, template=None)


def _comes_first(other: Priority, own: Priority) -> bool:
    return own is Priority.BATCH or other is Priority.INTERACTIVE
