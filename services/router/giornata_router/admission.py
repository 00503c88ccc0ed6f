"""Admission: which jobs are accepted, and when they will have their pictures."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Final

import nats.errors
import structlog
from nats.js import JetStreamContext

from giornata.bus.connection import ask_jetstream
from giornata.scheduling.demand import JobDemand, JobFinishEstimate, estimate_computed
from giornata.scheduling.placement import Placement
from giornata.scheduling.queue import DemandTotal, JobQueue, QueuedJob, RowQueue
from giornata.scheduling.scheduler import ROW
from giornata.wire import subjects
from giornata.wire.errors import (
    BatchQueueFull,
    InteractiveQueueFull,
    QueueFull,
    QueueTooLong,
    StoreFull,
    TenantQueueFull,
)
from giornata.wire.jobs import Job, Priority
from giornata.wire.messages import JobEstimate
from giornata.wire.models import ModelCard
from giornata.wire.workers import QueueState, ServiceName, StoreRoom
from giornata_router.prepost import StagePlacement

RETRY_AFTER_S: Final = 5.0
_FULL: Final[Mapping[Priority, type[QueueFull]]] = {
    Priority.INTERACTIVE: InteractiveQueueFull,
    Priority.BATCH: BatchQueueFull,
}


class QueueLimiter:
    """Counts jobs against `limits`; one tenant may take `tenant_share` of each limit, and at least one place."""

    def __init__(self, limits: Mapping[Priority, int], tenant_share: float) -> None:
        self._limits = limits
        self._tenant_limits = {p: max(1, int(limit * tenant_share)) for p, limit in limits.items()}
        self._jobs: Counter[Priority] = Counter()
        self._tenants: Counter[tuple[str, Priority]] = Counter()

    @property
    def full(self) -> bool:
        """Return whether a priority has no place left."""
        return any(self._jobs[priority] >= limit for priority, limit in self._limits.items())

    def check(self, job: QueuedJob) -> None:
        """Return if there is a place for `job`.

        Raises:
            InteractiveQueueFull, BatchQueueFull: its priority has none.
            TenantQueueFull: its tenant has as many as it may.
        """
        limit, own = self._limits[job.priority], self._tenant_limits[job.priority]
        if self._jobs[job.priority] >= limit:
            raise _FULL[job.priority](
                received=f"{self._jobs[job.priority]} unfinished {job.priority} jobs",
                accepted=f"at most {limit}",
                retry_after_s=RETRY_AFTER_S,
            )
        if self._tenants[job.flow] >= own:
            raise TenantQueueFull(
                received=f"{self._tenants[job.flow]} unfinished {job.priority} jobs of this tenant",
                accepted=f"at most {own} of {limit}",
                retry_after_s=RETRY_AFTER_S,
            )

    def take(self, job: QueuedJob) -> None:
        """Count an accepted job."""
        self._jobs[job.priority] += 1
        self._tenants[job.flow] += 1

    def give_back(self, job: QueuedJob) -> None:
        """The job has ended."""
        self._jobs[job.priority] -= 1
        self._tenants[job.flow] -= 1
        if not self._tenants[job.flow]:
            del self._tenants[job.flow]


class FinishTimeEstimator:
    """Tells when jobs end; a job whose pictures were not inspected counts as the latest one of its model.

    `prepost` are the stages beside denoising.
    """

    def __init__(
        self,
        placement: Placement,
        line: RowQueue,
        prepost: StagePlacement | None = None,
    ) -> None:
        self._placement, self._line = placement, line
        self._prepost = prepost or StagePlacement(placement.fleet)
        self._preparing: dict[str, QueuedJob] = {}
        """Carried jobs that neither wait for a worker nor have one."""
        self._latest: dict[str, JobDemand] = {}
        """The latest demand of each model, by its digest."""
        self._finishing: dict[str, float] = {}
        """When each job that is decoded and pasted should have its pictures, in seconds."""

    def learn(self, demand: JobDemand) -> None:
        """Remember what a job asks for whose pictures were inspected."""
        self._latest[demand.model_digest] = demand

    def begin(self, job: QueuedJob) -> None:
        """A job's pictures are inspected and encoded from now on."""
        self._preparing[job.job_id] = job

    def prepared(self, job_id: str) -> None:
        """The job's rows come into the line now, or it has ended."""
        self._preparing.pop(job_id, None)

    def queue(self, waiting: JobQueue, *, full: bool, unreadable: int = 0) -> QueueState:
        """Return what telemetry tells of the jobs that no worker has; `full` where more jobs are refused."""
        line, served = self._line.total, self._served()
        one = served[0].name if len(served) == 1 else None  # of several models each has a wait of its own
        return QueueState(
            jobs=line.jobs + len(waiting),
            rows=line.rows + waiting.rows,
            steps=line.steps + waiting.steps,
            full=full,
            unreadable=unreadable,
            wait_ms=self.waits_ms(len(waiting)).get(one) if one else None,
            costs=tuple(self._placement.estimates.kinds()),
        )

    def admit(self, job: QueuedJob, waiting: int) -> None:
        """Let a job come, behind `waiting` ones that are not carried yet.

        Raises:
            QueueTooLong: its turn would not come within its own budget. How long it takes
                itself is no reason: its pictures were not inspected.
        """
        demand = self._expected(job)
        if demand is None:
            return
        ahead = self._line.before(job.priority)
        unplaced = waiting + self._preparing_before(job.priority)
        wait_ms = self._wait_ms(demand, ahead, unplaced)
        stages_ms = self._prepost.wait_ms(job.model_digest, job, waiting)
        wait_ms = max(wait_ms or 0.0, stages_ms) or wait_ms
        limit_s = job.budget_s
        if wait_ms is not None and wait_ms / 1e3 > limit_s:
            raise QueueTooLong(
                "An edit that came now would wait too long.",
                received=f"{ahead.jobs + unplaced} jobs before it, about {wait_ms / 1e3:.0f} s until its turn",
                accepted=f"at most {limit_s:.0f} s",
                retry_after_s=float(math.ceil(wait_ms / 1e3 - limit_s)),
            )

    def of(self, job: QueuedJob, now: float, waiting: int | None) -> JobEstimate | None:
        """The forecast of an unfinished job; None while it is unknown.

        `waiting` tells how many jobs come before one that is not carried yet; None for a carried one.
        """
        stages_ms = self._prepost.wait_ms(job.model_digest, job, waiting or 0)
        if (finished_s := self._finishing.get(job.job_id)) is not None:
            waits_ms = stages_ms if job.job_id in self._prepost else 0.0
            return JobEstimate(position=0, finish_ms=max(0.0, finished_s - now) * 1e3 + waits_ms)
        if job.job_id in self._line or self._placement.assigned(job.job_id):
            return self._of_prepared(job.job_id, now)
        if waiting is None and job.job_id not in self._preparing:
            return None
        expected, ahead = self._expected(job), self._line.total
        before = 0 if waiting is None else waiting + self._preparing_before(job.priority)
        found = self._computed(expected, ahead.size, before) if expected is not None else None
        if expected is None or found is None:
            return None
        prepare_ms = stages_ms + self._prepost.costs.known(job.model_digest, "inspect", "encode").total_ms
        # others are computed while it is prepared
        computed_ms = max(found.finish_ms, prepare_ms + found.alone_ms)
        return JobEstimate(position=ahead.jobs + before, finish_ms=computed_ms + self.finish_ms(expected))

    def _of_prepared(self, job_id: str, now: float) -> JobEstimate | None:
        """The forecast of a job with rows in the line, or at workers, or both."""
        demands = [booking.demand for booking in self._placement.assigned(job_id)]
        computed_ms, position = self._placement.finish_ms(job_id), 0
        if job_id in self._line:
            order = self._line.order(now)
            index = next(index for index, entry in enumerate(order) if entry.job_id == job_id)
            before = sum(entry.demand.size for entry in order[:index])
            found = self._computed(order[index].demand, before)
            position = 0 if demands else index
            demands.append(order[index].demand)
            computed_ms = found and max(found.finish_ms, computed_ms or 0.0)
        if computed_ms is None:
            return None
        return JobEstimate(position=position, finish_ms=computed_ms + sum(map(self.finish_ms, demands)))

    def finish_ms(self, of: JobDemand) -> float:
        """Time that decoding and pasting all rows take."""
        return of.rows * self._prepost.costs.known(of.model_digest, "finish").total_ms

    @contextmanager
    def finishing(self, job: Job, now: float) -> Iterator[None]:
        """Inside, all rows of a job are decoded and pasted, from `now` on."""
        each_ms = self._prepost.costs.known(job.model_digest, "finish").total_ms
        self._finishing[job.job_id] = now + job.row_count * each_ms / 1e3
        try:
            yield
        finally:
            del self._finishing[job.job_id]

    def waits_ms(self, waiting: int) -> dict[str, float]:
        """Return how long one more picture would wait behind `waiting` jobs that are not carried yet, by model.

        A model is left out while that is unknown.
        """
        found: dict[str, float] = {}
        for card in self._served():
            latest = self._latest.get(card.digest)
            demand = JobDemand(card.name, card.digest, latest.shapes[:1] if latest else (ROW,))
            wait_ms = self._wait_ms(demand, self._line.total, waiting)
            if wait_ms is not None:
                found[card.name] = max(wait_ms, self._prepost.wait_ms(card.digest, jobs=waiting))
        return found

    def _served(self) -> list[ModelCard]:
        ready = self._placement.fleet.ready(ServiceName.DENOISER)
        return list({card.digest: card for state in ready for card in state.models}.values())

    def _preparing_before(self, priority: Priority) -> int:
        """Jobs that are prepared and come before a new one."""
        return sum(priority in {job.priority, Priority.BATCH} for job in self._preparing.values())

    def _wait_ms(self, demand: JobDemand, ahead: DemandTotal, jobs: int) -> float | None:
        """Return how long `demand` would wait behind others and so many jobs like it; None while it is unknown."""
        if not ahead.jobs and not jobs and self._placement.has_room(demand):
            return 0.0
        found = self._computed(demand, ahead.size, jobs)
        return None if found is None else found.finish_ms - found.alone_ms

    def _computed(self, demand: JobDemand, ahead: float, jobs: int = 0) -> JobFinishEstimate | None:
        """Return when `demand` is computed behind others and so many jobs like it, each piece by any worker."""
        piece, whole = demand.piece().size, demand.size
        amount = ahead + jobs * whole
        return estimate_computed(self._placement.prospects(demand.piece()), amount / piece, whole / piece)

    def _expected(self, job: QueuedJob) -> JobDemand | None:
        latest = self._latest.get(job.model_digest)
        if latest is None:
            return None
        shape = replace(latest.shapes[0], steps=job.steps)
        return replace(latest, shapes=(shape,) * job.rows, template=None)


READ_S: Final = 1.0
FULL_RETRY_S: Final = 30.0
DOOR: Final = 0.9
"""Share of the bucket beyond which no job is accepted."""
GROWTH_BYTES: Final = 16 << 10
"""Room kept for every unfinished job, whose record grows until it ends: with ten pictures of 4096 tokens to 10 kB."""

_STREAMS: Final = (subjects.JOBS, *subjects.STREAMS)

log = structlog.get_logger(__name__)


class StreamCapacity:
    """The fill level of each stream. Nothing is known, and every job may come, until :meth:`watch` has read it."""

    def __init__(self, jetstream: JetStreamContext) -> None:
        self._jetstream = jetstream
        self._stores: Mapping[str, StoreRoom] = {}
        self._unfinished = 0
        """Jobs in the work queue at the last reading, and accepted since."""

    @property
    def stores(self) -> tuple[StoreRoom, ...] | None:
        """Every stream; None while nothing is known."""
        return tuple(self._stores.values()) or None

    def take(self) -> None:
        """Count one more job, or raise StoreFull if its record may not fit."""
        records = self._stores.get(subjects.bucket_stream(subjects.RECORDS))
        if records is not None and not may_come(records, self._unfinished):
            raise StoreFull(
                received=f"{records.used_bytes} of {records.limit_bytes} bytes taken by records, "
                f"{self._unfinished} unfinished jobs",
                retry_after_s=FULL_RETRY_S,
            )
        self._unfinished += 1

    async def watch(self) -> None:
        """Read the room for ever; a reading that fails leaves what is known."""
        while True:
            try:
                await self._read()
            except nats.errors.Error as error:
                log.warning("room_not_read", error=repr(error))
            await asyncio.sleep(READ_S)  # no event tells of it

    async def _read(self) -> None:
        asks = (ask_jetstream(partial(self._jetstream.stream_info, name)) for name in _STREAMS)
        found = dict(zip(_STREAMS, await asyncio.gather(*asks), strict=True))
        self._stores = {
            name: StoreRoom(store=name, used_bytes=info.state.bytes, limit_bytes=info.config.max_bytes)
            for name, info in found.items()
            if info.config.max_bytes is not None and info.config.max_bytes > 0
        }
        self._unfinished = found[subjects.JOBS].state.messages


def may_come(records: StoreRoom, unfinished: int) -> bool:
    """Return whether one more job fits, so that all of the `unfinished` ones before it can still write their ends.

    A full stream takes no revision that is as large as the one that it replaces, and with replicas none at all.
    """
    return records.used_bytes + (unfinished + 1) * GROWTH_BYTES <= DOOR * records.limit_bytes
