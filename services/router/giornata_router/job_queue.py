"""The work queue: jobs are accepted durably, held in memory, and as many are run as the fleet computes.

Every message of the queue is delivered to the router that leads. A consumer belongs to one leader and has the leader's
epoch in its name. JetStream lets no two consumers of a work queue have the same subject, so a new leader deletes the
one of an earlier leader. Everything unacknowledged then comes again, at once. An earlier leader that wakes up late
finds a consumer of a later epoch and stops; what it acknowledges goes to a consumer that is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final

import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import APIError, NotFoundError

from giornata.bus.bus import Bus
from giornata.bus.connection import ask_jetstream, error_code
from giornata.bus.streams import is_full
from giornata.scheduling.queue import InFlightJobWindow, JobQueue, NextJob, QueuedJob
from giornata.wire import codec, subjects
from giornata.wire.errors import GiornataError, JobNotFound, QueueFull, ServiceUnavailable, StorageFull
from giornata.wire.jobs import Job, Priority
from giornata.wire.messages import (
    IDEMPOTENCY_HEADER,
    CancelRows,
    Epoch,
    JobAck,
    JobEstimate,
    JobEstimateRequest,
    SubmitRequest,
)
from giornata.wire.workers import QueueState, ServiceName
from giornata_router import job_records
from giornata_router.admission import RETRY_AFTER_S, QueueLimiter
from giornata_router.dispatch import RouterContext
from giornata_router.job_runner import HeldJob, carry, end_unheld, heed_record

PULL_S: Final = 5.0
"""A pull waits this long: a restarted server forgets it without a word."""
PULLED: Final = 2048
"""Messages of one pull."""
ACK_WAIT_S: Final = 7 * 24 * 3600.0
"""Longer than any edit may take. What is not acknowledged comes again when the consumer is made again."""
UNUSED_S: Final = 300.0
"""JetStream deletes a consumer that was not used for so long."""
NAMED_S: Final = 5.0
"""Limit of one question for the consumers' names."""
LEFT_S: Final = 0.5
"""A leader that steps down tries no longer than this to delete its consumer."""
_NOT_UNIQUE: Final = 10100
"""JetStream's error code: another consumer has the subject."""
_TRIES: Final = 5
_ALIVE, _NOTHING, _EXPIRED = "100", "404", "408"
"""Statuses: a heartbeat, no message, the pull's time is over."""
AUDIT_S = 30.0
"""How often the queue is asked for messages that were delivered and lost on their way."""
SETTLED_S = 5.0
"""Time in which a message that JetStream has delivered arrives, if it does."""
AGAIN_S = 1.0
"""Time after which a queue that does not answer is asked again."""
LOOK_S = 0.25
"""How often the window is fitted to the fleet, and budgets are looked at; telemetry comes too often for that."""
CATCH_UP_S = 5.0
"""Limit of the time after a takeover in which no new job is begun: until all are known, no order is fair."""
ENDED_AT_ONCE = 64
"""Jobs that are ended side by side without being carried: cancelled ones, and those with a budget that is over."""
KEPT = timedelta(days=1)
"""An unreadable message is kept for the longest budget. No client waits after that, and the record is gone too."""
_MESSAGES_EXCEEDED = 10077

log = structlog.get_logger(__name__)


class LaterLeaderError(nats.errors.Error):
    """A router that began to lead later has taken the queue over."""


class QueueConsumer:
    """Delivers the jobs of one priority to the leader of an epoch. They are held until they are acknowledged."""

    def __init__(self, bus: Bus, priority: Priority, epoch: Epoch) -> None:
        self._client, self._jetstream = bus.client, bus.jetstream
        self._subject, self._priority, self._epoch = subjects.jobs(priority), priority, epoch
        self._name = subjects.queue_consumer_name(priority, epoch)
        self._news = asyncio.Queue[Msg | None]()
        self.behind = 1
        """Messages that were in the queue when it was taken over, and have not come yet."""
        self.ended = 0
        """Jobs that were acknowledged."""

    async def consume(self, take: Callable[[Msg], Awaitable[None]], look: Callable[[], None]) -> None:
        """Give `take` each message, and call `look` after it; runs for ever.

        Raises:
            LaterLeaderError: another router has begun to lead.
        """
        while True:
            try:
                self.behind = await self.begin()
                async with aclosing(self.messages()) as messages:
                    look()
                    async for message in messages:
                        await take(message)
                        self.behind -= 1
                        look()
            except LaterLeaderError:
                log.warning("later_leader", priority=self._priority)
                raise
            except nats.errors.Error as error:
                log.warning("queue_unreachable", error=repr(error))
                await asyncio.sleep(AGAIN_S)  # the client is reconnecting; there is nothing to wait on

    async def audit(self, arrived: Callable[[int], int]) -> None:
        """Have delivered again what was delivered and did not arrive: its server may have died on the way. For ever.

        `arrived` counts the messages up to a sequence number that are held.
        """
        while True:
            await asyncio.sleep(AUDIT_S)
            try:
                count, last = await self.delivered()
            except nats.errors.Error as error:
                log.warning("queue_not_audited", error=repr(error))
                continue
            ended = self.ended
            await asyncio.sleep(SETTLED_S)
            if count > arrived(last) + self.ended - ended:
                log.warning("deliveries_lost", priority=self._priority)
                self.again()

    async def begin(self) -> int:
        """Take the queue over: make the consumer in place of earlier ones, its own among them.

        Returns how many messages are to come.

        Raises:
            LaterLeaderError: it belongs to a later leader.
        """
        config = ConsumerConfig(
            durable_name=self._name,
            filter_subject=self._subject,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=ACK_WAIT_S,
            max_deliver=-1,
            max_ack_pending=-1,
            inactive_threshold=UNUSED_S,
        )
        for _ in range(_TRIES):
            await self._delete_earlier()
            try:
                info = await ask_jetstream(partial(self._jetstream.add_consumer, subjects.JOBS, config))
            except APIError as error:
                if error.err_code != _NOT_UNIQUE:
                    raise
            else:
                return info.num_pending or 0
        raise LaterLeaderError

    async def _delete_earlier(self) -> None:
        for name in await ask_jetstream(self._names):
            epoch = subjects.queue_consumer_epoch(name, self._priority)
            if epoch is None:
                continue
            if epoch > self._epoch:
                raise LaterLeaderError
            with contextlib.suppress(NotFoundError):
                await ask_jetstream(partial(self._jetstream.delete_consumer, subjects.JOBS, name))

    async def _names(self) -> list[str]:
        """The queue's consumers, also those without a leader, which a list of their states lacks."""
        answer = await self._client.request(f"$JS.API.CONSUMER.NAMES.{subjects.JOBS}", timeout=NAMED_S)
        told = json.loads(answer.data)
        if "error" in told:
            raise APIError.from_error(told["error"])
        return list(told.get("consumers") or ())

    async def messages(self) -> AsyncGenerator[Msg, None]:
        """Messages as they come, each once, until :meth:`again`.

        Raises:
            nats.errors.Error: JetStream does not know the consumer, or has no leader for it.
        """
        news = self._news = asyncio.Queue[Msg | None]()
        inbox = self._client.new_inbox()
        subscription = await self._client.subscribe(inbox, cb=news.put)
        try:
            while True:
                asked = {"batch": PULLED, "expires": int(PULL_S * 1e9)}
                subject = f"$JS.API.CONSUMER.MSG.NEXT.{subjects.JOBS}.{self._name}"
                await self._client.publish(subject, json.dumps(asked).encode(), reply=inbox)
                for _ in range(PULLED):
                    try:
                        async with asyncio.timeout(PULL_S + 1):
                            message = await news.get()
                    except TimeoutError:
                        break
                    status = message.headers.get("Status") if message and message.headers else None
                    if status in {_NOTHING, _EXPIRED}:
                        break
                    if message is None:
                        return
                    if status is None:
                        yield message
                    elif status != _ALIVE:
                        raise nats.errors.Error(f"nats: {self._name}: {status}")
        finally:
            with contextlib.suppress(nats.errors.Error):  # without a connection there is nothing to end
                await subscription.unsubscribe()

    def again(self) -> None:
        """End :meth:`messages`: some may have been lost on their way."""
        self._news.put_nowait(None)

    async def delivered(self) -> tuple[int, int]:
        """Return how many messages are delivered and unacknowledged, and the sequence number of the last one."""
        info = await ask_jetstream(partial(self._jetstream.consumer_info, subjects.JOBS, self._name))
        return info.num_ack_pending or 0, info.delivered.stream_seq if info.delivered else 0

    async def end(self) -> None:
        """Leave the queue to the next leader, which may be of an older version that knows no epochs."""
        if self._client.is_connected:
            with contextlib.suppress(nats.errors.Error, TimeoutError):
                async with asyncio.timeout(LEFT_S):
                    await self._jetstream.delete_consumer(subjects.JOBS, self._name)


class LeaderJobQueue:
    """The active router's work, from taking the lease to giving it up. `walks` owns the jobs that are carried."""

    def __init__(self, tools: RouterContext, walks: asyncio.TaskGroup, epoch: Epoch) -> None:
        self._tools, self._walks = tools, walks
        config, bus = tools.config, tools.bus
        limits = dict.fromkeys(Priority, config.queue_limit)
        self._places = QueueLimiter(limits, config.tenant_share)
        self._waiting, self._window = JobQueue(config.ageing_s), InFlightJobWindow(config.prepared_rows)
        self._held: dict[str, HeldJob] = {}
        """Every accepted and unfinished job."""
        self._carried: dict[str, HeldJob] = {}
        self._caught_up_by_s = time.monotonic() + CATCH_UP_S
        workers = [state.worker for state in tools.dispatch.placement.fleet.all() if state.worker]
        self._begun = {row.job_id for told in workers for row in (*told.running, *told.waiting)}
        """Jobs that workers have had since before the queue was taken over."""
        self._unreadable: dict[int, Msg] = {}
        """Messages that another version accepted, or that are damaged, by sequence; a later leader may read them."""
        self._ended = False
        self._ending = asyncio.Semaphore(ENDED_AT_ONCE)
        self._consumers = {priority: QueueConsumer(bus, priority, epoch) for priority in Priority}

    def state(self) -> QueueState:
        """Return what telemetry tells of the queue."""
        full, unreadable = self._places.full, len(self._unreadable)
        return self._tools.forecasting.queue(self._waiting, full=full, unreadable=unreadable)

    def waits_ms(self) -> dict[str, float]:
        """Return how long one more picture would wait for a worker, by model."""
        return self._tools.forecasting.waits_ms(len(self._waiting))

    async def submit(self, request: SubmitRequest) -> JobAck:
        """Make a job durable; the reply means that it will end in a picture or a clear error.

        Raises:
            QueueTooLong: it would wait too long.
            QueueFull: as many jobs as may be are unfinished, of its priority or of its tenant.
            StoreFull: there is no room for its record.
            StorageFull: JetStream has no room on its disk, or for any stream.
            ServiceUnavailable: JetStream does not answer; the same job may be submitted again.
        """
        job = request.job
        own = None
        if job.job_id not in self._held:
            queued = QueuedJob.of(job, time.monotonic())
            self._places.check(queued)
            if not self._window.within_share(queued):  # else others make room for it
                self._tools.forecasting.admit(queued, self._waiting.ahead(queued))
            self._tools.room.take()
            own = self._hold(queued)
            own.creation = asyncio.get_running_loop().create_future()
        stored = created = None
        try:
            answer = await self._tools.bus.jetstream.publish(
                subjects.jobs(job.priority), codec.encode(job), headers={IDEMPOTENCY_HEADER: job.job_id}
            )
            stored = not answer.duplicate  # otherwise it may have ended
            created = await self._tools.records.create(job_records.accepted(job))
        except nats.errors.Error as error:
            if is_full(error):
                raise StorageFull(received=error, retry_after_s=RETRY_AFTER_S) from error
            if error_code(error) == _MESSAGES_EXCEEDED:
                raise QueueFull(retry_after_s=RETRY_AFTER_S) from error
            raise ServiceUnavailable("The work queue does not answer.", retry_after_s=2) from error
        finally:
            if own is not None and not own.created(created) and not stored:
                self._release(own)
        return JobAck(job_id=job.job_id)

    async def forecast(self, request: JobEstimateRequest) -> JobEstimate:
        """Endpoint ``giornata.router.forecast``.

        Raises:
            JobNotFound: it is not unfinished here, or neither its end nor its steps are known.
        """
        held, found = self._held.get(request.job_id), None
        if held is not None:
            waiting = None if request.job_id in self._carried else self._waiting.ahead(held.job)
            found = self._tools.forecasting.of(held.job, time.monotonic(), waiting)
        steps = tuple(self._tools.dispatch.placement.steps(request.job_id).items())
        if found is None and not steps:
            raise JobNotFound(received=request.job_id)
        return (found or JobEstimate()).model_copy(update={"steps": steps})

    def cancel(self, request: CancelRows) -> None:
        """End a job, carried or not: a cancel was broadcast."""
        held = self._held.get(request.job_id)
        if held is None:
            self._start(end_unheld(self._tools, request.job_id), name="cancel")
            return
        held.cancel()
        self._end_waiting([held.job])

    def recheck(self) -> None:
        """The connection is back, and messages may have been lost: cancels, and jobs on their way here."""
        for consumer in self._consumers.values():
            consumer.again()
        for held in self._carried.values():
            self._start(heed_record(self._tools, held), name="recheck")

    async def run(self) -> None:
        """Take jobs and have them carried; runs for ever.

        Raises:
            LaterLeaderError: another router has begun to lead; among others in an ExceptionGroup.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow(), name="window")
                for priority, consumer in self._consumers.items():
                    tasks.create_task(consumer.consume(self._take, self._fill), name=f"consume-{priority}")
                    tasks.create_task(
                        consumer.audit(partial(self._arrived, priority)), name=f"audit-{priority}"
                    )
        finally:
            self._ended = True
            for consumer in self._consumers.values():
                await consumer.end()

    def _arrived(self, priority: Priority, last: int) -> int:
        """Messages of a priority that are held, up to sequence number `last`."""
        jobs = (held for held in self._held.values() if held.job.priority is priority)
        arrived = sum(0 < held.sequence <= last for held in jobs)
        subject = subjects.jobs(priority)
        return arrived + sum(
            s <= last and message.subject == subject for s, message in self._unreadable.items()
        )

    async def _follow(self) -> None:
        """Fit the window to the fleet, end jobs that wait for longer than they may, and have lasting states written."""
        fleet = self._tools.dispatch.placement.fleet
        while True:
            now, ready = time.monotonic(), fleet.ready(ServiceName.DENOISER)
            self._window.resize(sum(state.worker.capacity_rows for state in ready if state.worker))
            self._end_waiting(self._waiting.overdue(now))
            for live in (held.walk.live for held in self._carried.values() if held.walk is not None):
                if live.unwritten(now):
                    self._start(live.write_state(), name="state")
            self._fill()
            await asyncio.sleep(LOOK_S)

    async def _take(self, message: Msg) -> None:
        """Hold a job that was delivered, maybe once more."""
        try:
            job = codec.decode(Job, message.data)
        except GiornataError as error:
            await self._put_aside(message, error)
            return
        sequence = message.metadata.sequence.stream
        held = self._held.get(job.job_id) or self._hold(QueuedJob.of(job, time.monotonic()))
        first = not held.sequence
        if first or held.sequence == sequence:
            held.deliver(message, sequence)
        else:  # submitted again after JetStream had forgotten the first time
            await message.ack()
        if not first:
            return
        self._waiting.join(held.job)
        if held.cancelled:
            self._end_waiting([held.job])
        elif job.job_id in self._begun:
            self._begun.discard(job.job_id)
            self._waiting.leave(job.job_id)
            self._begin(NextJob(held.job, yields=False))

    async def _put_aside(self, message: Msg, error: GiornataError) -> None:
        """Keep a message that cannot be read, without a place in the queue; end it once its budget is surely over."""
        sequence, job_id = message.metadata.sequence.stream, (message.headers or {}).get(IDEMPOTENCY_HEADER)
        kept = datetime.now(UTC) - message.metadata.timestamp < KEPT
        if sequence not in self._unreadable:
            log.error("job_unreadable", job=job_id, sequence=sequence, kept=kept, error=str(error))
        if kept:
            self._unreadable[sequence] = message
        else:
            self._unreadable.pop(sequence, None)
            await message.term()

    def _hold(self, job: QueuedJob) -> HeldJob:
        held = self._held[job.job_id] = HeldJob(job, job.since_s)
        self._places.take(job)
        return held

    def _release(self, held: HeldJob) -> None:
        if self._held.get(held.job.job_id) is held:
            del self._held[held.job.job_id]
            self._places.give_back(held.job)

    def _fill(self) -> None:
        """Carry as many jobs as the window has room for."""
        now = time.monotonic()
        if self._ended:
            return
        if now < self._caught_up_by_s and any(one.behind > 0 for one in self._consumers.values()):
            return
        while (turn := self._waiting.next(now)) is not None and self._window.has_room(turn):
            self._waiting.serve(turn)
            self._begin(turn)

    def _start(self, work: Coroutine[Any, Any, object], *, name: str) -> None:
        """Do `work` beside; no more once :meth:`run` has ended: walks are being cancelled, and another router goes on.

        A walk that was cancelled may still return as if it had not been: ``wait_for`` of Python 3.11 swallows that.
        Its task cannot be asked: one whose own group of tasks has failed says that it is being cancelled, too.
        """
        if self._ended:
            work.close()
        else:
            self._walks.create_task(work, name=name)

    def _begin(self, turn: NextJob) -> None:
        self._window.begin(turn)
        self._start(self._carry(self._held[turn.job.job_id]), name="walk")

    def _end_waiting(self, jobs: Iterable[QueuedJob]) -> None:
        """Let jobs that wait meet their end, without a place in the window."""
        for job in jobs:
            if self._waiting.leave(job.job_id) is not None:
                self._start(self._carry(self._held[job.job_id], self._ending), name="end")

    async def _carry(
        self,
        held: HeldJob,
        limit: AbstractAsyncContextManager[object] = nullcontext(),  # noqa: B008 - it has no state
    ) -> None:
        """Carry a job; then give its place back, or let it wait again after a while."""
        async with limit:
            self._carried[held.job.job_id] = held
            self._tools.forecasting.begin(held.job)
            try:
                ended = await carry(self._tools, held)
            finally:
                del self._carried[held.job.job_id]
                self._window.end(held.job)
                self._tools.forecasting.prepared(held.job.job_id)
        if ended:
            self._consumers[held.job.priority].ended += 1
            self._release(held)
        self._fill()
        if not ended:
            await asyncio.sleep(held.pause_s)
            self._waiting.join(held.job)
            self._fill()
