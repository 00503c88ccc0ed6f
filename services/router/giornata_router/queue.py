"""The work queue: accepting jobs durably, and carrying out what it holds."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass

import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.errors import APIError

from giornata.bus import streams
from giornata.wire import codec, subjects
from giornata.wire.errors import GiornataError, JobNotFound, QueueFull, ServiceUnavailable
from giornata.wire.jobs import Job, Priority
from giornata.wire.messages import Accepted, CancelRows, Forecast, ForecastRequest, SubmitRequest
from giornata_router.rules import transitions
from giornata_router.tools import Tools
from giornata_router.walk import Walk

FETCH_S = 5.0
"""A pull waits this long for a job before it asks again: a restarted server forgets it without a word."""
RETRY_S = 1.0
"""Time after which a job is tried again that NATS did not let be carried out, or that could not be read."""
RENEW_S = streams.ACK_WAIT_S / 3
"""A third of the time after which the queue gives a job to another router."""
_MESSAGES_EXCEEDED = 10077

log = structlog.get_logger(__name__)


@dataclass
class _CarriedJob:
    """A queue message whose job is being carried out here."""

    message: Msg
    job: Job
    walk: Walk | None = None
    cancelled: bool = False
    """A cancel was heard before there was a walk."""

    def cancel(self) -> None:
        """Stop the walk, or the one that will be."""
        self.cancelled = True
        if self.walk is not None:
            self.walk.cancel()


class Queue:
    """The active router's work, from taking the lease to giving it up. `walks` owns the jobs that are carried."""

    def __init__(self, tools: Tools, walks: asyncio.TaskGroup) -> None:
        self._tools, self._walks = tools, walks
        self._accepted: dict[str, tuple[Job, float]] = {}
        """Jobs that were not pulled from the queue yet, by id, and when they were accepted."""
        self._carried: dict[str, _CarriedJob] = {}
        self._room: dict[Priority, int] = {}
        """How many jobs more may be carried."""

    @property
    def full(self) -> bool:
        """Whether jobs of a priority are carried up to their limit, so that more may wait in the queue."""
        return not all(self._room.values())

    async def submit(self, request: SubmitRequest) -> Accepted:
        """Make a job durable; the reply means that it will end in a picture or a clear error.

        Raises:
            QueueTooLong: it would wait too long.
            QueueFull: as many jobs as may be are unfinished.
            ServiceUnavailable: JetStream does not answer; the same job may be submitted again.
        """
        job = request.job
        if job.job_id not in self._accepted and job.job_id not in self._carried:
            self._tools.forecasting.admit(job, self._unplaced())
        try:
            stored = await self._tools.bus.jetstream.publish(
                subjects.jobs(job.priority), codec.encode(job), headers={"Nats-Msg-Id": job.job_id}
            )
            if not stored.duplicate:
                self._accepted[job.job_id] = job, time.monotonic()
            await self._tools.records.create(transitions.accepted(job))
        except nats.errors.Error as error:
            if isinstance(error, APIError) and error.err_code == _MESSAGES_EXCEEDED:
                raise QueueFull(retry_after_s=5) from error
            raise ServiceUnavailable("The work queue does not answer.", retry_after_s=2) from error
        return Accepted(job_id=job.job_id)

    async def forecast(self, request: ForecastRequest) -> Forecast:
        """Endpoint ``giornata.router.forecast``.

        Raises:
            JobNotFound: it is not carried here, or neither its end nor its steps are known.
        """
        found = self._tools.forecasting.of(request.job_id, time.monotonic(), self._unplaced())
        steps = tuple(self._tools.dispatch.placement.steps(request.job_id).items())
        if found is None and not steps:
            raise JobNotFound(received=request.job_id)
        return (found or Forecast()).model_copy(update={"steps": steps})

    def _unplaced(self) -> list[Job]:
        """Accepted jobs that neither wait for a worker nor have one."""
        line, placement = self._tools.dispatch.line, self._tools.dispatch.placement
        jobs = [c.job for c in self._carried.values() if c.walk is None or c.walk.preparing]
        jobs += (job for job, _ in self._accepted.values())
        return [job for job in jobs if job.job_id not in line and not placement.assigned(job.job_id)]

    def cancel(self, request: CancelRows) -> None:
        """End a job, carried or not: a cancel was broadcast."""
        carried = self._carried.get(request.job_id)
        if carried is None:
            self._walks.create_task(self._end_if_cancelled(request.job_id), name="cancel")
        else:
            carried.cancel()

    def recheck(self) -> None:
        """Look at the record of every carried job: the connection is back and cancels may have been missed."""
        for job_id in self._carried:
            self._walks.create_task(self._end_if_cancelled(job_id), name="recheck")

    async def consume(self, priority: Priority, limit: int) -> None:
        """Take jobs of one priority, at most `limit` at a time; runs for ever."""
        slots = asyncio.Semaphore(limit)

        def given_back(_: asyncio.Task[None]) -> None:
            self._room[priority] += 1
            slots.release()

        self._room[priority] = limit
        consumer = await streams.queue_consumer(self._tools.bus.jetstream, priority, max_in_flight=limit)
        try:
            while True:
                await slots.acquire()
                message = await _next(consumer)
                if message is None:
                    slots.release()
                    continue
                task = self._walks.create_task(self._carry(message), name="walk")
                self._room[priority] -= 1
                task.add_done_callback(given_back)
        finally:
            with contextlib.suppress(nats.errors.Error):  # without a connection there is nothing to end
                # a message in its buffer would hold up the drain of the connection
                await consumer.unsubscribe()

    async def renew(self) -> None:
        """Tell the queue that the jobs carried here are still carried; runs for ever."""
        while True:
            await asyncio.sleep(RENEW_S)
            for carried in list(self._carried.values()):
                try:
                    await carried.message.in_progress()
                except nats.errors.Error as error:
                    log.warning("renewal_failed", error=repr(error))

    async def _carry(self, message: Msg) -> None:
        try:
            job = codec.decode(Job, message.data)
        except GiornataError as error:
            log.error("job_unreadable", error=str(error))
            await _hand_back(message, RETRY_S)  # a router of another version accepted it, and can read it
            return
        if job.job_id in self._carried:  # redelivered: the renewal was late
            self._carried[job.job_id].message = message
            return
        carried = _CarriedJob(message, job)
        self._carried[job.job_id] = carried
        try:
            await self._walk(job, carried)
            await carried.message.ack()
        except asyncio.CancelledError:
            await _hand_back(carried.message)
            raise
        except nats.errors.Error as error:
            log.warning("walk_interrupted", job=job.job_id, error=repr(error))
            await _hand_back(carried.message, RETRY_S)
        except Exception:  # a job that cannot even be closed is logged and tried again, alone
            log.exception("job_not_carried", job=job.job_id)
            await _hand_back(carried.message, RETRY_S)
        finally:
            del self._carried[job.job_id]

    async def _walk(self, job: Job, carried: _CarriedJob) -> None:
        now = time.monotonic()
        _, since_s = self._accepted.pop(job.job_id, (job, now))
        record = transitions.accepted(job)
        if not await self._tools.records.create(
            record
        ):  # else the router that accepted it died before it wrote it
            record = await self._tools.records.get(job.job_id)
        carried.walk = Walk(self._tools, record, (now - since_s) * 1e3)
        if carried.cancelled:
            carried.walk.cancel()
        record = await carried.walk.to_the_end()
        log.info(
            "job_ended",
            job=job.job_id,
            state=record.state,
            code=record.error.code if record.error else None,
            user=job.parameters.user,
            traceparent=job.traceparent,
            spent_ms=record.spent_ms,
        )

    async def _end_if_cancelled(self, job_id: str) -> None:
        """End a job whose record says so; if it waits in the queue, its message goes when it is pulled."""
        try:
            record = await self._tools.records.get(job_id)
            if record.cancel and job_id in self._carried:
                self._carried[job_id].cancel()
            elif record.cancel and not record.state.terminal:
                await Walk(self._tools, record, 0.0).to_the_end()
        except JobNotFound:
            log.info("cancel_of_unknown_job", job=job_id)
        except (GiornataError, nats.errors.Error) as error:  # it is cancelled when it is pulled
            log.warning("cancel_put_off", job=job_id, error=repr(error))


async def _next(consumer: JetStreamContext.PullSubscription) -> Msg | None:
    """The next job of a queue, or None when there was none for a while or the queue does not answer."""
    try:
        [message] = await consumer.fetch(1, timeout=FETCH_S)
    except TimeoutError:
        return None
    except nats.errors.Error as error:
        log.warning("queue_unreachable", error=repr(error))
        await asyncio.sleep(1)  # the client is reconnecting; there is nothing to wait on
        return None
    return message


async def _hand_back(message: Msg, delay_s: float | None = None) -> None:
    """Give the job to the next router that pulls, at once or after a while, and not after the time to acknowledge."""
    try:
        await message.nak(delay_s)
    except nats.errors.Error as error:
        log.warning("not_handed_back", error=repr(error))
