"""One job's way from the queue to its terminal state. Every step can be taken again by another router."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import nats.errors
import structlog

from giornata import subjects
from giornata.bus import Bus
from giornata.deadlines import Deadline
from giornata.errors import (
    AttemptsExhausted,
    DeadlineExceeded,
    GiornataError,
    InternalError,
    JobCancelled,
    Overloaded,
)
from giornata.events import DenoisedEvent, DoneEvent, EventKind, StateEvent
from giornata.jobs import Encoding, Inspection, JobRecord, JobState, Row
from giornata.messages import CancelRows, PrefetchTemplate, RunAnswer, RunReply, RunRequest
from giornata.quarantine import Quarantine
from giornata.records import Change, Records
from giornata.requests import Reuse
from giornata.scheduling.demand import Demand
from giornata.scheduling.line import Turn
from giornata_router import transitions
from giornata_router.config import RouterConfig
from giornata_router.dispatch import Dispatch, Outcome, Silence
from giornata_router.forecasting import Forecasting
from giornata_router.ledger import Ledger
from giornata_router.stages import Stages

RUN_REPLY_S = 5.0
"""A worker answers at once whether it takes rows; longer than this means it is gone."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Tools:
    """What every walk uses."""

    bus: Bus
    records: Records
    stages: Stages
    dispatch: Dispatch
    forecasting: Forecasting
    quarantine: Quarantine
    config: RouterConfig


class Walk:
    """Carries one job. Make it with its present record, then await :meth:`to_the_end` once."""

    def __init__(self, tools: Tools, record: JobRecord, waited_ms: float) -> None:
        self._tools = tools
        self._job = record.job
        self._record = record
        self._ledger = Ledger(record, waited_ms)
        self._deadline = Deadline.after_ms(record.job.budget_ms - record.spent_ms - waited_ms)
        self._scope: asyncio.Timeout | None = None
        self._cancelled = False
        self._doing = "waiting in the queue"

    @property
    def preparing(self) -> bool:
        """Whether its pictures are still inspected or encoded."""
        return self._record.state in {JobState.QUEUED, JobState.PREPARING}

    def cancel(self) -> None:
        """Somebody cancelled the job: stop at the next await."""
        self._cancelled = True
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())

    async def to_the_end(self) -> JobRecord:
        """Walk until the record is terminal and the `done` event is published.

        Raises:
            nats.errors.Error: NATS does not answer; the walk can be begun again with the record as it stands.
        """
        if not self._record.state.terminal:
            error = await self._try()
            if error is not None:
                await self._close(error)
        event = DoneEvent(
            job_id=self._job.job_id,
            state=self._record.state,
            error=self._record.error,
            stage_ms=self._record.stage_ms,
            slo_met=self._record.slo_met,
        )
        # a router that was believed dead, or the next one, may tell it again
        await self._publish(EventKind.DONE, event, message_id=f"{self._job.job_id}-done")
        return self._record

    async def _try(self) -> GiornataError | None:
        """The walk itself; the error that ends the job, if any."""
        limit_s = 0.0 if self._cancelled else self._deadline.remaining_s()
        scope = asyncio.timeout(limit_s)
        try:
            async with scope:
                self._scope = scope
                await self._walk()
        except nats.errors.Error:
            if scope.expired():
                return self._out_of_time()
            raise
        except TimeoutError:
            return self._out_of_time()
        except _EndedError:
            return None
        except GiornataError as error:
            return error
        except Exception:  # the walk's edge: a failing job fails alone, is logged and answered
            log.exception("walk_failed", job=self._job.job_id)
            return InternalError()
        finally:
            self._scope = None
        return None

    def _out_of_time(self) -> GiornataError:
        if self._cancelled:
            return JobCancelled()
        limit = f"{self._job.budget_ms} ms"
        return DeadlineExceeded(f"The time allowed for this edit ended while {self._doing}.", accepted=limit)

    async def _walk(self) -> None:
        self._check()
        if self._record.state is JobState.QUEUED:
            await self._enter(JobState.PREPARING)
        inspection = self._record.inspection or await self._inspect()
        self._tools.forecasting.learn(self._demand(inspection))
        while self._record.pending_rows:
            await self._denoise(inspection)
        await self._enter(JobState.FINISHING)
        rows = await self._finish(inspection)
        self._record = await self._tools.records.change(
            self._job.job_id, lambda record: transitions.ended(record, rows, self._ledger.times())
        )

    async def _inspect(self) -> Inspection:
        self._doing = "inspecting its pictures"
        with self._ledger.timing("prepare"):
            inspection = await self._tools.stages.inspect(self._job, self._deadline)
        self._ledger.compute("inspect", inspection.compute_ms)
        return inspection

    async def _encode(self, inspection: Inspection) -> Encoding:
        if self._record.encoding is not None:
            return self._record.encoding
        self._doing = "encoding"
        with self._ledger.timing("prepare"):
            encoding = await self._tools.stages.encode(self._job, inspection, self._deadline)
        self._ledger.compute("encode", encoding.compute_ms)
        prepare_ms = self._ledger.times().stage_ms.prepare
        self._tools.forecasting.stages.prepared(self._job.model_digest, inspection.tokens, prepare_ms)
        return encoding

    async def _denoise(self, inspection: Inspection) -> None:
        """One attempt at the rows that are still to be computed: send them, or wait for who has them already."""
        error = transitions.exhausted(self._record, self._tools.config.max_failures)
        if error is not None:
            raise error
        job_id = self._job.job_id
        async with self._tools.dispatch.expecting(job_id) as report:
            adopted = self._record.owner is not None
            try:
                if self._record.owner is None:
                    likely = await self._prefetch(inspection)
                    await self._assign(inspection, await self._encode(inspection), likely)
                else:  # they may not have been sent yet, or be done: who assigned them may have died at any moment
                    demand = self._demand(inspection)
                    self._tools.dispatch.adopt(job_id, self._record.attempt, self._record.owner, demand)
                if await self._offer(adopted=adopted):
                    self._doing = "denoising"
                    await self._settle(await report)
            finally:
                self._tools.dispatch.release(job_id)

    async def _prefetch(self, inspection: Inspection) -> str | None:
        """The worker that probably gets the rows; it may read their template from disk while they are encoded."""
        if self._job.parameters.reuse is Reuse.OFF:
            return None
        worker = self._tools.dispatch.likely(self._demand(inspection))
        if worker is not None:
            message = PrefetchTemplate(job=self._job, inspection=inspection)
            await self._tools.bus.publish(subjects.worker_prefetch(worker), message)
        return worker

    async def _assign(self, inspection: Inspection, encoding: Encoding, likely: str | None) -> None:
        """Choose a worker, and write down that it owns the next attempt; `likely` may be reading its template."""
        job, demand = self._job, self._demand(inspection)
        turn = Turn(job.priority, job.tenant, job.weight, self._denoised_by_s(demand))
        self._doing = "waiting for a worker with room"
        with self._ledger.timing("queue"):
            worker = await self._tools.dispatch.acquire(
                job.job_id, self._record.attempt + 1, demand, turn, fetching=likely
            )
        await self._change(
            lambda r: transitions.assigned(r, worker, inspection, encoding, self._ledger.times())
        )

    def _denoised_by_s(self, demand: Demand) -> float | None:
        """When the rows have to be computed, by the monotonic clock, for the job to end when its client wants it to."""
        slo_ms = self._job.parameters.slo_ms
        if slo_ms is None:
            return None
        left_ms = slo_ms - self._ledger.times().spent_ms - self._tools.forecasting.finish_ms(demand)
        return time.monotonic() + left_ms / 1e3

    def _demand(self, inspection: Inspection) -> Demand:
        return transitions.demand(self._record, inspection, max_failures=self._tools.config.max_failures)

    async def _offer(self, *, adopted: bool) -> bool:
        """Send the rows to the attempt's owner, which ignores what it has already; False if it did not take them.

        An attempt that nobody answers for is lost if the worker may have begun it; else no harm was done.
        """
        record = self._record
        if record.owner is None or record.inspection is None or record.encoding is None:
            raise InternalError("Rows are offered only after they have been assigned.")
        request = RunRequest(
            job=self._job,
            attempt=record.attempt,
            inspection=record.inspection,
            encoding=record.encoding,
            rows=record.pending_rows,
            remaining_ms=self._deadline.remaining_ms(),
        )
        limit = self._deadline.at_most(RUN_REPLY_S)
        try:
            reply = await self._tools.bus.call(subjects.worker_run(record.owner), request, RunReply, limit)
        except (Overloaded, DeadlineExceeded, InternalError) as error:
            log.warning("worker_unreachable", job=self._job.job_id, worker=record.owner, error=str(error))
            self._tools.dispatch.refuse(record.owner)
            if isinstance(error, Overloaded) and not adopted:
                await self._change(lambda r: transitions.taken_back(r, record.attempt))
            else:
                await self._lose(record.owner, record.attempt, str(error))
            return False
        if reply.answer is not RunAnswer.ACCEPTED:
            self._tools.dispatch.refuse(record.owner)
            await self._change(lambda r: transitions.taken_back(r, record.attempt))
            return False
        await self._tell(JobState.RUNNING)
        return True

    async def _settle(self, outcome: Outcome) -> None:
        """The record is the truth; the outcome only says that it is worth reading."""
        attempt, owner = self._record.attempt, self._record.owner
        self._record = await self._tools.records.get(self._job.job_id)
        if isinstance(outcome, DenoisedEvent):
            self._ledger.stage("queue", outcome.wait_ms)
            self._ledger.stage("denoise", outcome.denoise_ms)
            self._ledger.compute("denoise", outcome.compute_ms)
        self._check()
        if outcome is Silence.RECHECK or self._record.owner is None or owner is None:
            return
        log.warning("attempt_lost", job=self._job.job_id, worker=owner, attempt=attempt, why=str(outcome))
        await self._lose(owner, attempt, str(outcome.value if isinstance(outcome, Silence) else outcome))

    async def _lose(self, owner: str, attempt: int, why: str) -> None:
        """Give an attempt up; should its worker have it after all, it is to drop it."""
        await self._drop(owner, attempt)
        await self._change(lambda record: transitions.lost(record, attempt, why))

    async def _drop(self, owner: str, attempt: int) -> None:
        message = CancelRows(job_id=self._job.job_id, attempt=attempt)
        await self._tools.bus.publish(subjects.worker_cancel(owner), message)

    async def _finish(self, inspection: Inspection) -> tuple[Row, ...]:
        self._doing = "finishing"
        job, times, rows = self._job, self._tools.forecasting.stages, self._record.rows
        times.begin_finish(job.job_id, job.model_digest, inspection.tokens * len(rows), time.monotonic())
        found: tuple[Row, ...] = ()
        try:
            with self._ledger.timing("finish"):
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._finish_row(row, inspection)) for row in rows]
            found = tuple(task.result() for task in tasks)
        finally:
            completed = bool(found) and all(row.image for row in found)
            times.end_finish(job.job_id, time.monotonic(), completed=completed)
        return found

    async def _finish_row(self, row: Row, inspection: Inspection) -> Row:
        """The row with its picture or its error; a row that fails does not hold back the others."""
        if row.latents is None:
            return row
        try:
            reply = await self._tools.stages.finish(
                self._job, inspection, row.index, row.latents, self._deadline
            )
        except GiornataError as error:
            return row.model_copy(update={"error": error.body()})
        self._ledger.compute("decode", reply.decode_ms)
        self._ledger.compute("paste", reply.paste_ms)
        return row.model_copy(update={"image": reply.image})

    async def _close(self, error: GiornataError) -> None:
        """Write the terminal state of a job that was cancelled or failed, and free its worker."""
        if self._record.owner is not None:
            await self._drop(self._record.owner, self._record.attempt)
        close = transitions.cancelled if isinstance(error, JobCancelled) else transitions.failed
        self._record = await self._tools.records.change(
            self._job.job_id, lambda record: close(record, error, self._ledger.times())
        )
        if isinstance(error, AttemptsExhausted):
            log.error("job_quarantined", job=self._job.job_id, causes=self._record.causes)
            await self._tools.quarantine.put(self._record)

    async def _enter(self, state: JobState) -> None:
        await self._change(lambda record: transitions.entered(record, state, self._ledger.times()))
        await self._tell(state)

    async def _tell(self, state: JobState) -> None:
        event = StateEvent(job_id=self._job.job_id, state=state, attempt=self._record.attempt)
        await self._publish(EventKind.STATE, event)

    async def _publish(
        self, kind: EventKind, event: StateEvent | DoneEvent, *, message_id: str | None = None
    ) -> None:
        subject = subjects.event(self._job.gateway, self._job.job_id, kind)
        await self._tools.bus.publish(subject, event, message_id=message_id)

    async def _change(self, change: Change) -> JobRecord:
        self._record = await self._tools.records.change(self._job.job_id, change)
        self._check()
        return self._record

    def _check(self) -> None:
        """The record is the truth: about a cancel, whose broadcast only makes it quick, and about an end."""
        if self._record.state.terminal:
            raise _EndedError
        if self._record.cancel:
            raise JobCancelled


class _EndedError(Exception):
    """The job is terminal, and not by this walk: it was cancelled uncarried, or another router ended it."""
