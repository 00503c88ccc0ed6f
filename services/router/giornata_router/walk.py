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
from giornata.errors import DeadlineExceeded, GiornataError, InternalError, JobCancelled, ServiceUnavailable
from giornata.events import DenoisedEvent, DoneEvent, EventKind, StateEvent
from giornata.jobs import Encoding, Inspection, JobRecord, JobState, Row, StageTimes
from giornata.messages import CancelRows, RunAnswer, RunReply, RunRequest
from giornata.records import Change, Records
from giornata_router import transitions
from giornata_router.config import RouterConfig
from giornata_router.dispatch import Dispatch, Outcome, Silence
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
    config: RouterConfig


class Walk:
    """Carries one job. Make it with its present record, then await :meth:`to_the_end` once."""

    def __init__(self, tools: Tools, record: JobRecord, waited_ms: float) -> None:
        self._tools = tools
        self._job = record.job
        self._record = record
        self._stage_ms = record.stage_ms
        self._spent_before_ms = record.spent_ms
        self._began_s = time.monotonic()
        self._deadline = Deadline.after_ms(record.job.budget_ms - record.spent_ms)
        self._scope: asyncio.Timeout | None = None
        self._cancelled = False
        self._add("queue", waited_ms)

    def cancel(self) -> None:
        """Somebody cancelled the job: stop at the next await."""
        self._cancelled = True
        if self._scope is not None:
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
        )
        await self._publish(EventKind.DONE, event)
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
        except GiornataError as error:
            return error
        except Exception:  # the walk's edge: a failing job fails alone, is logged and answered
            log.exception("walk_failed", job=self._job.job_id)
            return InternalError()
        finally:
            self._scope = None
        return None

    def _out_of_time(self) -> GiornataError:
        return JobCancelled() if self._cancelled else DeadlineExceeded(accepted=f"{self._job.budget_ms} ms")

    async def _walk(self) -> None:
        if self._record.state is JobState.QUEUED:
            await self._enter(JobState.PREPARING)
        inspection = self._record.inspection or await self._inspect()
        while self._record.pending_rows:
            await self._denoise(inspection)
        await self._enter(JobState.FINISHING)
        rows = await self._finish(inspection)
        await self._change(lambda record: transitions.ended(record, rows, self._stage_ms, self._spent_ms()))

    async def _inspect(self) -> Inspection:
        began = time.monotonic()
        inspection = await self._tools.stages.inspect(self._job, self._deadline)
        self._add("prepare", _ms_since(began))
        return inspection

    async def _encode(self, inspection: Inspection) -> Encoding:
        if self._record.encoding is not None:
            return self._record.encoding
        began = time.monotonic()
        encoding = await self._tools.stages.encode(self._job, inspection, self._deadline)
        self._add("prepare", _ms_since(began))
        return encoding

    async def _denoise(self, inspection: Inspection) -> None:
        """One attempt at the rows that are still to be computed: send them, or wait for who has them already."""
        error = transitions.exhausted(self._record, self._tools.config.max_failures)
        if error is not None:
            raise error
        job_id = self._job.job_id
        async with self._tools.dispatch.expecting(job_id) as report:
            try:
                if self._record.owner is None:
                    if not await self._send(inspection, await self._encode(inspection)):
                        return
                else:  # another router sent them
                    demand = transitions.demand(self._record, inspection)
                    self._tools.dispatch.adopt(job_id, self._record.attempt, self._record.owner, demand)
                await self._settle(await report)
            finally:
                self._tools.dispatch.release(job_id)

    async def _send(self, inspection: Inspection, encoding: Encoding) -> bool:
        """Choose a worker and give it the rows; False if it did not take them."""
        began = time.monotonic()
        demand = transitions.demand(self._record, inspection)
        job = self._job
        worker = await self._tools.dispatch.acquire(job.job_id, self._record.attempt + 1, demand, job.priority)
        self._add("queue", _ms_since(began))
        record = await self._change(
            lambda r: transitions.assigned(r, worker, inspection, encoding, self._stage_ms, self._spent_ms())
        )
        request = RunRequest(
            job=job,
            attempt=record.attempt,
            inspection=inspection,
            encoding=encoding,
            rows=record.pending_rows,
            remaining_ms=self._deadline.remaining_ms(),
        )
        limit = self._deadline.at_most(RUN_REPLY_S)
        try:
            reply = await self._tools.bus.call(subjects.worker_run(worker), request, RunReply, limit)
        except (ServiceUnavailable, DeadlineExceeded) as error:
            log.warning("worker_unreachable", job=job.job_id, worker=worker, error=str(error))
            await self._change(lambda r: transitions.lost(r, record.attempt))
            self._tools.dispatch.refuse(worker)
            return False
        if reply.answer is not RunAnswer.ACCEPTED:
            self._tools.dispatch.refuse(worker)
            await self._change(lambda r: transitions.taken_back(r, record.attempt))
            return False
        await self._tell(JobState.RUNNING)
        return True

    async def _settle(self, outcome: Outcome) -> None:
        """The record is the truth; the outcome only says that it is worth reading."""
        attempt, owner = self._record.attempt, self._record.owner
        self._record = await self._tools.records.get(self._job.job_id)
        if isinstance(outcome, DenoisedEvent) and outcome.attempt == attempt:
            self._add("queue", outcome.wait_ms)
            self._add("denoise", outcome.denoise_ms)
        self._check_cancel()
        if outcome is Silence.RECHECK or self._record.owner is None or owner is None:
            return
        if isinstance(outcome, DenoisedEvent) and outcome.attempt != attempt:
            return  # a report of an older attempt; the present one goes on
        log.warning("attempt_lost", job=self._job.job_id, worker=owner, attempt=attempt, why=str(outcome))
        await self._tools.bus.publish(
            subjects.worker_cancel(owner), CancelRows(job_id=self._job.job_id, attempt=attempt)
        )
        await self._change(lambda record: transitions.lost(record, attempt))

    async def _finish(self, inspection: Inspection) -> tuple[Row, ...]:
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._finish_row(row, inspection)) for row in self._record.rows]
        self._add("finish", _ms_since(began))
        return tuple(task.result() for task in tasks)

    async def _finish_row(self, row: Row, inspection: Inspection) -> Row:
        """The row with its picture or its error; a row that fails does not hold back the others."""
        if row.latents is None:
            return row
        try:
            reply = await self._tools.stages.finish(self._job, inspection, row.index, row.latents, self._deadline)
        except GiornataError as error:
            return row.model_copy(update={"error": error.body()})
        return row.model_copy(update={"image": reply.image})

    async def _close(self, error: GiornataError) -> None:
        """Write the terminal state of a job that was cancelled or failed, and free its worker."""
        if self._record.owner is not None:
            message = CancelRows(job_id=self._job.job_id, attempt=self._record.attempt)
            await self._tools.bus.publish(subjects.worker_cancel(self._record.owner), message)
        close = transitions.cancelled if isinstance(error, JobCancelled) else transitions.failed
        self._record = await self._tools.records.change(
            self._job.job_id, lambda record: close(record, error, self._spent_ms())
        )

    async def _enter(self, state: JobState) -> None:
        await self._change(lambda record: transitions.entered(record, state, self._spent_ms()))
        await self._tell(state)

    async def _tell(self, state: JobState) -> None:
        event = StateEvent(job_id=self._job.job_id, state=state, attempt=self._record.attempt)
        await self._publish(EventKind.STATE, event)

    async def _publish(self, kind: EventKind, event: StateEvent | DoneEvent) -> None:
        await self._tools.bus.publish(subjects.event(self._job.gateway, self._job.job_id, kind), event)

    async def _change(self, change: Change) -> JobRecord:
        self._record = await self._tools.records.change(self._job.job_id, change)
        self._check_cancel()
        return self._record

    def _check_cancel(self) -> None:
        """The record is the truth about a cancel; the broadcast only makes it quick."""
        if self._record.cancel and not self._record.state.terminal:
            raise JobCancelled

    def _add(self, stage: str, ms: float) -> None:
        values = self._stage_ms.model_dump()
        self._stage_ms = StageTimes(**{**values, stage: values[stage] + ms})

    def _spent_ms(self) -> int:
        return self._spent_before_ms + int(_ms_since(self._began_s))


def _ms_since(began_s: float) -> float:
    return (time.monotonic() - began_s) * 1000
