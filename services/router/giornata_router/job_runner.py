"""One job on its way from the queue to its acknowledgement."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import nats.errors
import structlog
from nats.aio.msg import Msg

from giornata import tracing
from giornata.bus.connection import LostError
from giornata.records import RecordRevision
from giornata.scheduling.demand import JobDemand
from giornata.scheduling.queue import QueuedJob
from giornata.tracing import TraceSpanKind
from giornata.wire import codec
from giornata.wire.errors import (
    AttemptsExhausted,
    DeadlineExceeded,
    GiornataError,
    IntermediateLost,
    InternalError,
    JobCancelled,
    JobNotFound,
    ServiceUnavailable,
    StoreFull,
)
from giornata.wire.jobs import Assignment, BlobRef, Encoding, Inspection, Job, JobRecord, JobState, RowRecord
from giornata.wire.values import ComputeTimes, Intermediate, StageTimes
from giornata_router import job_records
from giornata_router.dispatch import DenoiseStage, RouterContext
from giornata_router.job_records import JobEndedError, LiveJobRecord
from giornata_router.leadership import LeaseEndedError

MOST_REMAKE_PAUSE_S: Final = 30.0
"""Longest pause before a result is made again that was lost again and again."""

log = structlog.get_logger(__name__)


class JobRunner:
    """Carries one job: make it with its record as last known, then await :meth:`to_the_end` once."""

    def __init__(self, tools: RouterContext, known: RecordRevision[JobRecord], waited_ms: float) -> None:
        self._tools, self._job = tools, known.record.job
        self.live = LiveJobRecord(tools.bus, tools.records, known, waited_ms)
        self._sheet, self._deadline = self.live.sheet, self.live.deadline
        self._scope: asyncio.Timeout | None = None
        self._cancelled = False
        self._made: list[BlobRef] = []
        """What stages made for this walk."""
        self._pictures: dict[int, BlobRef] = {}
        """Finished ones, by row."""

    def cancel(self) -> None:
        """The job is cancelled: stop at the next await."""
        self._cancelled = True
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())

    async def to_the_end(self) -> JobRecord:
        """Walk until the record is terminal, the `done` event is published, and what has no more use is deleted.

        A router that dies before the deletion leaves the job in the queue: the next one deletes what the terminal
        record still names, and the rest ends with its time.

        Raises:
            nats.errors.Error: NATS does not answer, or was lost as the end was told; the walk can be begun again with
                the record as it stands.
            LeaseEndedError: it can be begun again by the router that leads.
        """
        if not self.live.record.state.terminal:
            over = self._cancelled or not self._deadline.remaining_s()
            error = self._out_of_time() if over else await self._try()
            if error is not None:
                await self._close(error)
        client = self._tools.bus.client
        losses = client.losses
        await self.live.tell_end()
        await self._clear()
        if client.losses != losses:
            # Nobody may have heard it, and once the queue has forgotten the job, nobody tells it.
            raise LostError
        return self.live.record

    def _spent(self, record: JobRecord) -> JobRecord:
        """Note what the record names, since the terminal one does not name it any more."""
        self._made += job_records.of_record(record)
        return record

    async def _clear(self) -> None:
        """Delete the job's own blobs that have no more use. What cannot be deleted ends with its time."""
        refs = job_records.leftovers(self.live.record, self._made)
        try:
            await self._tools.blobs.delete(*refs)
        except GiornataError as error:
            log.warning("leftovers_stay", job=self._job.job_id, blobs=len(refs), error=str(error))

    async def _try(self) -> GiornataError | None:
        """The walk itself; the error that ends the job, if any."""
        scope = asyncio.timeout(self._deadline.remaining_s())
        try:
            async with scope:
                self._scope = scope
                with self._tools.prepost.carrying(self._job):
                    await self._run_stages()
        except nats.errors.Error:
            if scope.expired():
                return self._out_of_time()
            raise
        except TimeoutError:
            return self._out_of_time()
        except JobEndedError:
            return None
        except GiornataError as error:
            return error
        except LeaseEndedError:
            raise
        except Exception:  # the walk's edge: a failing job fails alone, is logged and answered
            log.exception("job_run_failed", job=self._job.job_id)
            return InternalError()
        finally:
            self._scope = None
        return None

    def _out_of_time(self) -> GiornataError:
        if self._cancelled:
            return JobCancelled()
        message = f"The time allowed for this edit ended while {self.live.doing}."
        return DeadlineExceeded(message, accepted=f"{self._job.budget_ms} ms")

    async def _run_stages(self) -> None:
        live = self.live
        live.check()
        if live.record.state is JobState.QUEUED:
            await live.enter(JobState.PREPARING)
        rows = await self._stages()
        while lost := job_records.lost_intermediates(rows):
            await self._make_again(lost)
            rows = await self._stages()
        await live.revise(lambda record: job_records.ended(self._spent(record), rows, self._sheet.times()))

    async def _stages(self) -> tuple[RowRecord, ...]:
        """Every stage that the record lacks; the rows with pictures or errors, or as soon as some lost something."""
        live = self.live
        inspection = live.record.inspection or await self._inspect()
        if live.record.pending_rows:
            inspection = await self._denoise(inspection)
            if job_records.lost_intermediates(live.record.rows):
                return live.record.rows
        await live.enter(JobState.FINISHING)
        return await self._finish(inspection)

    async def _make_again(self, lost: Mapping[int, Intermediate], *, inspected: bool = False) -> None:
        """Send rows back; inspect the pictures again where that made what was lost, or as `inspected` says."""
        remade = self.live.record.remade
        log.warning("intermediate_lost", job=self._job.job_id, rows=lost, inspected=inspected, remade=remade)
        if remade:  # a store that loses everything is not worked for at full speed
            await asyncio.sleep(min(MOST_REMAKE_PAUSE_S, 0.1 * 2.0 ** min(remade, 10)))
        inspected = inspected or Intermediate.ALPHA in lost.values()
        inspection = await self._inspect() if inspected else None
        await self.live.change(lambda r: job_records.made_again(r, lost, inspection, self._sheet.times()))

    async def _inspect(self) -> Inspection:
        self.live.doing = "inspecting its pictures"
        with self._sheet.timing("prepare"):
            inspection = await self._tools.prepost.inspect(self._job, self._deadline)
        self._made += job_records.of_inspection(inspection)
        self._sheet.compute("inspect", inspection.compute_ms)
        return inspection

    async def _encode(self, inspection: Inspection) -> Encoding:
        self.live.doing = "encoding"
        with self._sheet.timing("prepare"):
            encoding = await self._tools.prepost.encode(self._job, inspection, self._deadline)
        self._made += job_records.of_encoding(encoding)
        self._sheet.compute("encode", encoding.compute_ms)
        return encoding

    async def _denoise(self, inspection: Inspection) -> Inspection:
        """Have the pending rows computed; the inspection, which is another one if its picture had been lost."""
        record = self.live.record
        demand = job_records.demand(record, inspection, record.pending_rows, None)
        self._tools.forecasting.learn(demand)
        encoding, likely = record.encoding, None
        if encoding is None:
            likely = await self._prefetch(inspection, demand)
        while encoding is None:
            try:
                encoding = await self._encode(inspection)
            except IntermediateLost:
                await self._make_again({}, inspected=True)
                inspection = self.live.record.inspection or inspection
        self._tools.forecasting.prepared(self._job.job_id)
        await DenoiseStage(self._tools, self.live, inspection, encoding, likely).run()
        return inspection

    async def _prefetch(self, inspection: Inspection, demand: JobDemand) -> str | None:
        """Tell the worker that probably gets a row to load its template and LoRAs while the rows are encoded."""
        if demand.template is None and not demand.adapters:
            return None
        worker = self._tools.dispatch.likely(demand)
        if worker is not None:
            await self._tools.workers.prefetch(worker, self._job, inspection)
            self._tools.dispatch.fetching(worker, demand)
        return worker

    async def _finish(self, inspection: Inspection) -> tuple[RowRecord, ...]:
        """The rows with their pictures or errors; a picture that fails does not hold back the others.

        Regions are rows of one picture, which their first one has.
        """
        rows, job = self.live.record.rows, self._job
        self.live.doing = "finishing"
        with self._tools.forecasting.finishing(job, time.monotonic()), self._sheet.timing("finish"):
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._finished(of_one, inspection))
                    for of_one in ([rows] if job.regions else [(row,) for row in rows])
                ]
        return tuple(row for task in tasks for row in task.result())

    async def _finished(self, rows: tuple[RowRecord, ...], inspection: Inspection) -> tuple[RowRecord, ...]:
        """The rows of one picture with it, or with its error; as they are if one has failed. It is made once."""
        latents, index = tuple(row.latents for row in rows if row.latents is not None), rows[0].index
        if len(latents) < len(rows):
            return rows
        try:
            if index not in self._pictures:
                reply = await self._tools.prepost.finish(
                    self._job, inspection, index, latents, self._deadline
                )
                self._sheet.compute("decode", reply.decode_ms)
                self._sheet.compute("paste", reply.paste_ms)
                self._made.append(reply.image)
                self._pictures[index] = reply.image
        except GiornataError as error:
            return tuple(row.model_copy(update={"error": error.body()}) for row in rows)
        return rows[0].model_copy(update={"image": self._pictures[index]}), *rows[1:]

    async def _close(self, error: GiornataError) -> None:
        """Write the terminal state of a job that was cancelled or failed, and free its workers."""
        if isinstance(error, AttemptsExhausted):
            await self._quarantine(error)
        held: tuple[Assignment, ...] = ()

        def closed(record: JobRecord) -> JobRecord:
            nonlocal held
            held = record.assignments
            return job_records.closed(self._spent(record), error, self._sheet.times())

        await self.live.revise(closed)
        for assignment in held:
            await self._tools.workers.drop(self._job.job_id, assignment)

    async def _quarantine(self, error: AttemptsExhausted) -> None:
        """Keep the job for an operator, before its terminal record: a router that finds that one does no more."""
        record = await self._tools.records.get(self._job.job_id)
        if not record.state.terminal:
            log.error("job_quarantined", job=self._job.job_id, causes=record.causes)
            await self._tools.quarantine.put(job_records.closed(record, error, self._sheet.times()))


ACKNOWLEDGED_S: Final = 2.0
"""Limit of one acknowledgement."""
FIRST_PAUSE_S: Final = 1.0
MOST_PAUSE_S: Final = 60.0
"""A job that cannot be carried is tried again after so long; each pause is twice the one before."""


@dataclass
class HeldJob:
    """An accepted job, and its message in the work queue."""

    job: QueuedJob
    waits_since_s: float
    """Since when it has waited, for its first try or for the next one."""
    data: bytes = b""
    """The job itself, encoded: decoded ones would take ten times the memory."""
    reply: str = ""
    """Where the message is acknowledged; empty until it is delivered."""
    sequence: int = 0
    """The message's number in the stream; 0 until it is delivered."""
    walk: JobRunner | None = None
    cancelled: bool = False
    """A cancel was heard, maybe before there was a walk."""
    tries: int = 0
    """Tries that failed."""
    creation: asyncio.Future[int | None] | None = None
    """Which revision the submission has written of the record, if any; None where another router took the job in."""

    def deliver(self, message: Msg, sequence: int) -> None:
        """The message has come, maybe once more: what comes last is acknowledged."""
        self.data, self.reply, self.sequence = message.data, message.reply, sequence

    def created(self, revision: int | None) -> bool:
        """The submission has ended, and has written `revision` of the record, if any. Whether the message is here."""
        if self.creation is not None and not self.creation.done():
            self.creation.set_result(revision)
        return bool(self.reply)

    async def first_revision(self) -> int | None:
        """The revision that the submission writes; None if it wrote none, or others may have followed."""
        return None if self.creation is None or self.tries else await asyncio.shield(self.creation)

    def cancel(self) -> None:
        """Stop the walk, or the one that will be."""
        self.cancelled = True
        if self.walk is not None:
            self.walk.cancel()

    @property
    def pause_s(self) -> float:
        """Time until the next try."""
        return min(MOST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self.tries - 1, 10))


async def carry(tools: RouterContext, held: HeldJob) -> bool:
    """Carry a job to its end, and take its message out of the queue; False if that has to be tried again."""
    job_id = held.job.job_id
    try:
        await _run_job(tools, held)
        await tools.bus.client.request(held.reply, b"+ACK", timeout=ACKNOWLEDGED_S)  # out of the queue then
    except (nats.errors.Error, StoreFull, LeaseEndedError) as error:
        log.warning("job_run_interrupted", job=job_id, error=repr(error))
    except GiornataError as error:  # its record cannot be read
        if held.tries == 0:
            log.error("job_not_carried", job=job_id, error=str(error))
    except Exception:  # a job that cannot even be closed is logged and tried again, alone
        log.exception("job_not_carried", job=job_id)
    else:
        return True
    held.tries += 1
    return False


async def _run_job(tools: RouterContext, held: HeldJob) -> None:
    job = codec.decode(Job, held.data)
    waited_s, held.waits_since_s = time.monotonic() - held.waits_since_s, time.monotonic()
    with tracing.span(
        "job",
        TraceSpanKind.TAKES,
        root=True,
        parent=tracing.below(job.traceparent),
        began_ago_s=waited_s,
        job=job.job_id,
        model=job.model,
        task=job.task.value,
        rows=job.row_count,
        tries=held.tries + 1,
    ) as span:
        tracing.past("queue", waited_s)
        held.walk = JobRunner(tools, await _known(tools, held, job), waited_s * 1e3)
        if held.cancelled:
            held.walk.cancel()
        try:
            record = await held.walk.to_the_end()
        finally:
            held.walk, held.waits_since_s = None, time.monotonic()
        span.note(state=record.state.value)
        if record.error is not None:
            span.fail(record.error.code)
        _tell(job, record)


async def _known(tools: RouterContext, held: HeldJob, job: Job) -> RecordRevision[JobRecord]:
    """The record of a job: as its submission has just written it, or as it stands.

    One that cannot be read is written over when the job's time is over, since nothing else will end the job.
    """
    record = job_records.accepted(job)
    revision = await held.first_revision()
    if revision is None:  # the router that accepted it may have died before it wrote the record
        revision = await tools.records.create(record)
    if revision is not None:
        return RecordRevision(record, revision)
    try:
        return await tools.records.read(job.job_id)
    except ServiceUnavailable:
        raise
    except GiornataError as error:
        if time.monotonic() < held.job.since_s + held.job.budget_s:
            raise
        times = job_records.JobTimes(StageTimes(queue=job.budget_ms), ComputeTimes(), job.budget_ms)
        record = job_records.closed(record, error, times)
        await tools.quarantine.put(record)
        return RecordRevision(record, await tools.records.put(record))


async def heed_record(tools: RouterContext, held: HeldJob) -> None:
    """Cancel a carried job if its record says so."""
    try:
        if (await tools.records.get(held.job.job_id)).cancel:
            held.cancel()
    except (GiornataError, nats.errors.Error, LeaseEndedError) as error:
        log.warning("record_not_heeded", job=held.job.job_id, error=repr(error))


async def end_unheld(tools: RouterContext, job_id: str) -> None:
    """End a job that has not come yet, if its record says that it is cancelled; its message goes when it comes."""
    try:
        known = await tools.records.read(job_id)
        if known.record.cancel and not known.record.state.terminal:
            await JobRunner(tools, known, 0.0).to_the_end()
    except JobNotFound:
        log.info("cancel_of_unknown_job", job=job_id)
    except (GiornataError, nats.errors.Error, LeaseEndedError) as error:
        log.warning("cancel_put_off", job=job_id, error=repr(error))


def _tell(job: Job, record: JobRecord) -> None:
    log.info(
        "job_ended",
        job=job.job_id,
        state=record.state,
        code=record.error.code if record.error else None,
        user=job.parameters.user,
        traceparent=job.traceparent,
        spent_ms=record.spent_ms,
    )
