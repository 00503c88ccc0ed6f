"""A job's rows at the workers: placed, sent, waited for, and placed again where they came back.

Rows that one worker gets together are an attempt. The attempts of a job are independent: some may be computed while
others wait, and rows lost with their worker are placed again while the others go on.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

import nats.errors
import structlog

from giornata import tracing
from giornata.blobs import BlobStore
from giornata.bus.bus import Bus
from giornata.deadlines import heed_cancel
from giornata.records import JobRecordStore, Quarantine
from giornata.scheduling.demand import JobDemand
from giornata.scheduling.placement import Placement
from giornata.scheduling.queue import Key, RowQueue, SchedulingParams
from giornata.scheduling.scheduler import Scheduler, find_yielding_attempt, likely_worker
from giornata.scheduling.worker_state import Attempt
from giornata.tracing import TraceSpanKind
from giornata.wire.errors import DeadlineExceeded, GiornataError, InternalError, JobCancelled, Overloaded
from giornata.wire.jobs import Assignment, Encoding, Inspection, JobRecord, JobState, RowRecord, assignments
from giornata.wire.messages import DenoisedEvent, RunAnswer, RunRequest
from giornata.wire.workers import ServiceState
from giornata_router import job_records
from giornata_router.admission import FinishTimeEstimator, StreamCapacity
from giornata_router.config import RouterConfig
from giornata_router.job_records import JobEndedError, LiveJobRecord
from giornata_router.leadership import Leadership, LeaseEndedError, WorkerClient
from giornata_router.prepost import PrepostClient

log = structlog.get_logger(__name__)

SHARES_S: Final = 0.25
"""Least time between two checks for rows that have to give way to another tenant's."""


class NoReport(Enum):
    """Why the report of an attempt is no longer waited for."""

    LOST = "the worker fell silent"
    UNLISTED = "the worker does not know the rows"
    STALLED = "the worker's step did not end"
    PREEMPTED = "other rows come first"
    RECHECK = "reports may have been missed while disconnected"


Outcome = DenoisedEvent | NoReport
LOST: Final = frozenset(why.name.lower() for why in (NoReport.LOST, NoReport.UNLISTED, NoReport.STALLED))
"""How attempts end whose worker is at fault."""


class PendingRows:
    """Rows of one job in the line, and what was decided about them that the job has not taken yet."""

    def __init__(self, rows: Sequence[int], numbers: Iterator[int], claim: SchedulingParams) -> None:
        self.claim = claim
        self.left = list(rows)
        """Rows that have no worker."""
        self.placed: list[Assignment] = []
        """Assignments that the job has not taken."""
        self.likely: list[str] = []
        """Workers that the job has to tell to load what it needs, since they probably get rows."""
        self._numbers = numbers
        self._news = asyncio.Event()

    def give(self, worker: str, rows: Sequence[int]) -> Assignment:
        """Assign `rows` to `worker`, as an attempt of their own."""
        given = Assignment(next(self._numbers), worker, tuple(rows))
        self.left = [row for row in self.left if row not in rows]
        self.placed.append(given)
        self._news.set()
        return given

    def load(self, worker: str) -> None:
        """Have `worker` told to load."""
        self.likely.append(worker)
        self._news.set()

    async def news(self) -> tuple[list[Assignment], list[str]]:
        """Take the assignments made, and the likely workers found, since the last call; waits for some."""
        await self._news.wait()
        self._news.clear()
        taken = self.placed, self.likely
        self.placed, self.likely = [], []
        return taken


class Dispatch:
    """Applies the scheduler's decisions, and tells each job what becomes of its attempts.

    `connected` says whether telemetry could be heard now. `listened_s` is the clock in which silence is counted, and
    that :meth:`look` is told (:class:`giornata.fleet.ListeningClock`).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        placement: Placement,
        line: RowQueue,
        connected: Callable[[], bool] = lambda: True,
        listened_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.placement, self.line = placement, line
        self._scheduler, self._connected, self._listened_s = scheduler, connected, listened_s
        self._pending: dict[Key, PendingRows] = {}
        self._reports: dict[Attempt, asyncio.Future[Outcome]] = {}
        self._claims: dict[Attempt, SchedulingParams] = {}
        """Those of the attempts at workers."""
        self._shares_s = 0.0
        """Time of the next check for rows that have to give way."""
        self._wake: asyncio.TimerHandle | None = None
        placement.listen(listened_s())

    def observe(self, state: ServiceState) -> None:
        """Take in telemetry: a worker may have room again."""
        if self.placement.observe(state, self._listened_s()):
            self._decide()

    def report(self, event: DenoisedEvent) -> None:
        """A worker is done with an attempt; a report of another worker than its present one is void."""
        attempt = event.job_id, event.attempt
        if self.placement.worker(attempt) == event.worker:
            self._resolve(attempt, event)

    def recheck(self) -> None:
        """The connection is back and reports may have been missed: every job reads its record again."""
        self.placement.listen(self._listened_s())
        for attempt in list(self._reports):
            self._resolve(attempt, NoReport.RECHECK)

    def likely(self, demand: JobDemand) -> str | None:
        """See :func:`giornata.scheduling.scheduler.likely_worker`."""
        return likely_worker(self._scheduler, self.placement, demand, time.monotonic())

    def fetching(self, worker: str, demand: JobDemand) -> None:
        """A worker was told to load what `demand` needs."""
        self.placement.fetch(worker, demand, self._listened_s())

    @asynccontextmanager
    async def in_line(
        self,
        job_id: str,
        rows: Sequence[int],
        demand: JobDemand,
        claim: SchedulingParams,
        *,
        numbers: Iterator[int],
        fetching: str | None = None,
    ) -> AsyncIterator[PendingRows]:
        """Wait for workers with room inside; what is placed counts as assigned from that moment.

        `rows` are indices of the job's rows, and `numbers` those of its next attempts; `fetching` is a worker that has
        been told to load what they need.
        """
        claim = replace(claim, takes_s=self.placement.least_ms(demand.piece()) / 1e3)
        key = self.line.join(job_id, demand, claim, time.monotonic(), rows=rows, fetching=fetching).key
        pending = self._pending[key] = PendingRows(rows, numbers, claim)
        self._decide()
        try:
            yield pending
        finally:
            self.line.leave(key)
            del self._pending[key]
            for assignment in pending.placed:
                self.release(job_id, assignment.attempt)

    def adopt(self, job_id: str, assignment: Assignment, demand: JobDemand, claim: SchedulingParams) -> None:
        """Count rows as on the worker that has them already, since another router or an earlier walk gave them."""
        self._claims[job_id, assignment.attempt] = claim
        self.placement.assign(job_id, assignment.attempt, assignment.worker, demand, self._listened_s())

    def release(self, job_id: str, attempt: int) -> None:
        """The rows of an attempt are on no worker any more; rows that wait may have the room."""
        self.placement.release(job_id, attempt)
        self._claims.pop((job_id, attempt), None)
        self._decide()

    @asynccontextmanager
    async def expecting(self, job_id: str, attempt: int) -> AsyncIterator[asyncio.Future[Outcome]]:
        """A future of what becomes of an attempt. Enter before its rows are sent; on leaving it is released."""
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._reports[job_id, attempt] = future
        try:
            yield future
        finally:
            del self._reports[job_id, attempt]
            self.release(job_id, attempt)

    def expect_again(self, attempt: Attempt) -> asyncio.Future[Outcome]:
        """A future of the next outcome of an expected attempt."""
        future = self._reports[attempt] = asyncio.get_running_loop().create_future()
        return future

    def look(self, now: float) -> None:
        """Forget workers that fell silent or whose step does not end, and tell the jobs that wait on them.

        Without a connection every worker is silent, and after a start or a reconnect it takes a while to hear of all.
        """
        if not self._connected():
            self.placement.listen(now)
            return
        given_up = {
            NoReport.LOST: self.placement.expire(now),
            NoReport.UNLISTED: self.placement.unlisted(),
            NoReport.STALLED: self.placement.stalled(),
        }
        for why, bookings in given_up.items():
            for booking in bookings:
                self._resolve(booking.key, why)

    def _resolve(self, attempt: Attempt, outcome: Outcome) -> None:
        future = self._reports.get(attempt)
        if future is not None and not future.done():
            future.set_result(outcome)

    def _decide(self) -> None:
        """Ask the scheduler, apply its decision, and ask again when it wants to be asked."""
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        now = time.monotonic()
        self.placement.heed(self.line.models)
        decision = self._scheduler.decide(self.line, self.placement, now)
        for key, worker, rows, passes in decision.placements:
            pending = self._pending[key]
            given = pending.give(worker, rows)
            self._claims[key[0], given.attempt] = pending.claim
            demand = self.line.serve(key, rows, now, passes)
            self.placement.assign(key[0], given.attempt, worker, demand, self._listened_s())
        for key, worker, demand in decision.loads:
            self._pending[key].load(worker)
            self.line.tell(key, worker)
            self.placement.fetch(worker, demand, self._listened_s())
        wake_at = decision.wake_at
        if len(self.line):
            if now >= self._shares_s:
                self._shares_s = now + SHARES_S
                gives_way = find_yielding_attempt(self.line, self.placement, self._claims, now)
                if gives_way is not None:
                    self._resolve(gives_way, NoReport.PREEMPTED)
            wake_at = min(self._shares_s, wake_at or math.inf)
        if wake_at is not None:
            self._wake = asyncio.get_running_loop().call_later(wake_at - now, self._decide)


RUN_REPLY_S: Final = 5.0
"""A worker answers at once whether it takes rows; after this time it counts as gone."""


@dataclass(frozen=True)
class RouterContext:
    """Edges and books of one router."""

    bus: Bus
    records: JobRecordStore
    prepost: PrepostClient
    dispatch: Dispatch
    forecasting: FinishTimeEstimator
    quarantine: Quarantine
    room: StreamCapacity
    config: RouterConfig
    workers: WorkerClient
    leadership: Leadership
    blobs: BlobStore


class DenoiseStage:
    """Make it once the job is encoded, then await :meth:`run` once.

    `fetching` is the worker that was told to load what the rows need while they were encoded.
    """

    def __init__(
        self,
        tools: RouterContext,
        live: LiveJobRecord,
        inspection: Inspection,
        encoding: Encoding,
        fetching: str | None,
    ) -> None:
        self._tools, self._dispatch = tools, tools.dispatch
        self._live, self._sheet, self._job = live, live.sheet, live.job
        self._inspection, self._encoding, self._fetching = inspection, encoding, fetching
        self._numbers = itertools.count(live.record.attempt + 1)
        self._tasks = asyncio.TaskGroup()
        self._within = tracing.headers()
        """The walk's span, below which every attempt is, whichever task found its worker."""
        self._left_by: dict[int, str] = {}
        """The span of the last attempt that ended without a row, by the row's index."""

    async def run(self) -> None:
        """Wait until every row has its latents or an error.

        Raises:
            AttemptsExhausted: too many workers were lost with one of them.
        """
        with self._sheet.denoising():
            try:
                async with self._tasks:
                    self._resume_or_place(self._live.record.pending_rows)
            except ExceptionGroup as group:
                raise _foremost(group) from None

    def _resume_or_place(self, rows: Sequence[RowRecord]) -> None:
        """Ask the workers that have rows whether they do, and place the other rows."""
        for assignment in assignments(rows):
            # they may not have been sent yet, or be done: the router that assigned them may have died at any moment
            held = [row for row in rows if row.index in assignment.rows]
            self._tasks.create_task(self._attempt(assignment, held, adopted=True), name="attempt")
        free = [row for row in rows if row.worker is None]
        if free:
            self._tasks.create_task(self._place(free), name="place")

    async def _place(self, rows: Sequence[RowRecord]) -> None:
        """Find workers for `rows`, and write the assignments down before the rows are sent."""
        job_records.check_failures(rows, self._live.record.causes, self._tools.config.max_failures)
        demand = self._demand(rows)
        self._live.doing = "waiting for a worker with room"
        with tracing.span("place", parent=self._within, rows=len(rows)) as span:
            async with self._dispatch.in_line(
                self._job.job_id,
                [row.index for row in rows],
                demand,
                self._claim(demand),
                numbers=self._numbers,
                fetching=self._fetching,
            ) as pending:
                while pending.left or pending.placed:
                    given, likely = await pending.news()
                    if span is not tracing.NO_SPAN:
                        self._tell(given, span)
                    if given:
                        await self._assign(given)
                    for worker in likely:
                        await self._tools.workers.prefetch(worker, self._job, self._inspection)

    def _tell(self, given: Sequence[Assignment], span: tracing.Span) -> None:
        """Return what was decided, for the span of the decision."""
        finish_ms = self._dispatch.placement.finish_ms(self._job.job_id)
        if finish_ms is not None:
            span.note(predicted_ms=finish_ms)
        for one in given:
            span.event("placed", worker=one.worker, attempt=one.attempt, rows=len(one.rows))

    async def _assign(self, given: Sequence[Assignment]) -> None:
        begun: list[Assignment] = []

        def assigned(record: JobRecord) -> JobRecord:
            return job_records.assigned(record, given, self._inspection, self._encoding, self._sheet.times())

        try:
            record = await self._live.change(assigned)
            for assignment in given:
                if assignment in record.assignments:
                    begun.append(assignment)
                    self._begin(assignment, _pending(record, assignment.rows))
                else:  # another router was faster with some of them
                    self._resume_or_place(_pending(record, assignment.rows))
        finally:
            for assignment in given:
                if assignment not in begun:
                    self._dispatch.release(self._job.job_id, assignment.attempt)

    def _begin(self, assignment: Assignment, rows: Sequence[RowRecord]) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            if task.cancelled():  # maybe before it ran, so that it has released nothing
                self._dispatch.release(self._job.job_id, assignment.attempt)

        task = self._tasks.create_task(self._attempt(assignment, rows, adopted=False), name="attempt")
        task.add_done_callback(ended)

    async def _attempt(self, assignment: Assignment, rows: Sequence[RowRecord], *, adopted: bool) -> None:
        """Send `rows` to their worker, which may have them already, and wait for what becomes of them."""
        job_id, attempt = self._job.job_id, assignment.attempt
        links = {self._left_by[row.index]: None for row in rows if row.index in self._left_by}
        with tracing.span(
            "attempt",
            TraceSpanKind.ASKS,
            parent=self._within,
            links=links,
            attempt=attempt,
            worker=assignment.worker,
        ) as span:
            async with self._dispatch.expecting(job_id, attempt) as report:
                if adopted:
                    self._dispatch.adopt(
                        job_id, assignment, demand := self._demand(rows), self._claim(demand)
                    )
                record = await self._offered(assignment, rows, adopted=adopted)
                how = "not_taken"
                if record is None:
                    ended = report
                    while (outcome := await ended) is NoReport.PREEMPTED:
                        ended = self._dispatch.expect_again((job_id, attempt))
                        await self._tools.workers.drop(job_id, assignment, hand_back=True)
                    record, how = await self._settled(assignment, outcome), _outcome(outcome)
            left = _pending(record, assignment.rows)
            span.note(outcome=how)
            if left:
                self._left_by |= dict.fromkeys((row.index for row in left), span.traceparent or "")
                if how in LOST:
                    span.fail("attempt_lost")
        self._resume_or_place(left)

    async def _offered(
        self, assignment: Assignment, rows: Sequence[RowRecord], *, adopted: bool
    ) -> JobRecord | None:
        """Send the rows to their worker, which ignores rows it has already; return the record if it did not take them.

        Without an answer, the attempt is lost if the worker may have begun it, and taken back otherwise.
        """
        job, worker = self._job, assignment.worker
        by_s = self._denoised_by_s(self._demand(rows))
        request = RunRequest(
            job=job,
            attempt=assignment.attempt,
            inspection=self._inspection,
            encoding=self._encoding,
            rows=tuple(rows),
            remaining_ms=self._live.deadline.remaining_ms(),
            denoise_within_ms=None if by_s is None else (by_s - time.monotonic()) * 1e3,
        )
        limit = self._live.deadline.at_most(RUN_REPLY_S)
        try:
            reply = await self._tools.workers.run(worker, request, limit)
        except (Overloaded, DeadlineExceeded, InternalError) as error:
            log.warning("worker_unreachable", job=job.job_id, worker=worker, error=str(error))
            self._dispatch.placement.refuse(worker)
            if isinstance(error, Overloaded) and not adopted:
                return await self._live.change(lambda r: job_records.taken_back(r, assignment))
            return await self._lost(assignment, str(error))
        heed_cancel()
        if reply.answer is not RunAnswer.ACCEPTED:
            self._dispatch.placement.refuse(worker)
            return await self._live.change(lambda r: job_records.taken_back(r, assignment))
        self._live.doing = "denoising"
        await self._live.tell(JobState.RUNNING, assignment.attempt)
        return None

    async def _settled(self, assignment: Assignment, outcome: Outcome) -> JobRecord:
        """Read the record, which is the truth: an outcome only says that it may have changed."""
        if isinstance(outcome, DenoisedEvent):
            self._sheet.denoised(outcome.denoise_ms)
            self._sheet.compute("denoise", outcome.compute_ms)
        record = await self._live.reread()
        if outcome is NoReport.RECHECK or assignment not in record.assignments:
            return record
        why = str(outcome.value if isinstance(outcome, NoReport) else outcome)
        log.warning("attempt_lost", job=self._job.job_id, **assignment._asdict(), why=why)
        return await self._lost(assignment, why)

    async def _lost(self, assignment: Assignment, why: str) -> JobRecord:
        """Give an attempt up; its worker drops the rows if it has them after all.

        What ends a job here is the death of the worker that its row had for itself. One that is silent, but still
        connected, may be frozen or cut off: its rows stay isolated, as if they might bring workers down, and go on.
        """
        job_id, limit, most = self._job.job_id, self._tools.config.max_failures, None
        await self._tools.workers.drop(job_id, assignment)
        last = any(row.failures + 1 >= limit for row in _pending(self._live.record, assignment.rows))
        if last and not await self._tools.workers.is_gone(job_id, assignment):
            most = limit - 1
        return await self._live.change(lambda record: job_records.lost(record, assignment, why, at_most=most))

    def _demand(self, rows: Sequence[RowRecord]) -> JobDemand:
        record, limit = self._live.record, self._tools.config.max_failures
        return job_records.demand(record, self._inspection, rows, self._encoding, max_failures=limit)

    def _claim(self, demand: JobDemand) -> SchedulingParams:
        job = self._job
        return SchedulingParams(job.priority, job.tenant, job.weight, self._denoised_by_s(demand))

    def _denoised_by_s(self, demand: JobDemand) -> float | None:
        """Return when the rows have to be computed for the job to end as its client wishes, by the monotonic clock."""
        slo_ms = self._job.parameters.slo_ms
        if slo_ms is None:
            return None
        left_ms = slo_ms - self._sheet.times().spent_ms - self._tools.forecasting.finish_ms(demand)
        return time.monotonic() + left_ms / 1e3


def _pending(record: JobRecord, rows: Sequence[int]) -> tuple[RowRecord, ...]:
    """The ones of `rows` that are still to be computed."""
    return tuple(row for row in record.pending_rows if row.index in rows)


def _outcome(outcome: Outcome) -> str:
    """Return how an attempt ended, for its span."""
    if isinstance(outcome, NoReport):
        return outcome.name.lower()
    return "handed_back" if outcome.handed_back else "computed"


def _foremost(group: ExceptionGroup) -> Exception:
    """The error that says what becomes of the job, where several attempts failed at once."""
    kinds = (LeaseEndedError, JobEndedError, JobCancelled, GiornataError, nats.errors.Error, Exception)
    found = [_foremost(error) if isinstance(error, ExceptionGroup) else error for error in group.exceptions]
    return min(found, key=lambda error: [isinstance(error, kind) for kind in kinds].index(True))
