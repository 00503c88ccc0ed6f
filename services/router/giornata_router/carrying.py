"""One queued job from its turn to its acknowledgement; a try that fails begins again from the record, later."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Final

import nats.errors
import structlog
from nats.aio.msg import Msg

from giornata.bus.work_queue import acknowledge
from giornata.records import RecordRevision
from giornata.scheduling.waiting import QueuedJob
from giornata.seeing import spans
from giornata.seeing.told import TraceSpanKind
from giornata.wire import codec
from giornata.wire.errors import GiornataError, JobNotFound, ServiceUnavailable, StoreFull
from giornata.wire.jobs import Job
from giornata.wire.progress import JobRecord
from giornata.wire.values import ComputeTimes, StageTimes
from giornata_router.lease import LeaseEndedError
from giornata_router.rules import transitions
from giornata_router.tools import RouterContext
from giornata_router.walk import JobRunner

FIRST_PAUSE_S: Final = 1.0
MOST_PAUSE_S: Final = 60.0
"""A job that cannot be carried is tried again after so long; each pause is twice the one before."""

log = structlog.get_logger(__name__)


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
        await _walk(tools, held)
        await acknowledge(tools.bus.client, held.reply)
    except (nats.errors.Error, StoreFull, LeaseEndedError) as error:
        log.warning("walk_interrupted", job=job_id, error=repr(error))
    except GiornataError as error:  # its record cannot be read
        if held.tries == 0:
            log.error("job_not_carried", job=job_id, error=str(error))
        if not isinstance(error, ServiceUnavailable) and _is_over(held):
            return await _give_up(tools, held, error)
    except Exception:  # a job that cannot even be closed is logged and tried again, alone
        log.exception("job_not_carried", job=job_id)
    else:
        return True
    held.tries += 1
    return False


async def _walk(tools: RouterContext, held: HeldJob) -> None:
    job = codec.decode(Job, held.data)
    waited_s, held.waits_since_s = time.monotonic() - held.waits_since_s, time.monotonic()
    with spans.span(
        "job",
        TraceSpanKind.TAKES,
        root=True,
        parent=spans.below(job.traceparent),
        began_ago_s=waited_s,
        job=job.job_id,
        model=job.model,
        task=job.task.value,
        rows=job.row_count,
        tries=held.tries + 1,
    ) as span:
        spans.past("queue", waited_s)
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
    """The record of a job: as its submission has just written it, or as it stands."""
    record = transitions.accepted(job)
    revision = await held.first_revision()
    if revision is None:  # the router that accepted it may have died before it wrote the record
        revision = await tools.records.create(record)
    return await tools.records.read(job.job_id) if revision is None else RecordRevision(record, revision)


async def _give_up(tools: RouterContext, held: HeldJob, error: GiornataError) -> bool:
    """End a job with a record that cannot be read, since nothing else will: its time is over."""
    job = codec.decode(Job, held.data)
    times = transitions.JobTimes(StageTimes(queue=job.budget_ms), ComputeTimes(), job.budget_ms)
    record = transitions.closed(transitions.accepted(job), error, times)
    try:
        await tools.quarantine.put(record)
        known = RecordRevision(record, await tools.records.put(record))
        await JobRunner(tools, known, 0.0).to_the_end()
        await acknowledge(tools.bus.client, held.reply)
    except (nats.errors.Error, StoreFull, LeaseEndedError) as failure:
        log.warning("job_not_given_up", job=job.job_id, error=repr(failure))
        held.tries += 1
        return False
    _tell(job, record)
    return True


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


def _is_over(held: HeldJob) -> bool:
    return time.monotonic() >= held.job.since_s + held.job.budget_s


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
