"""The work queue: jobs are accepted durably, held in memory, and as many are run as the fleet computes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import aclosing
from functools import partial
from typing import Any, Final

import nats.errors
import structlog
from nats.aio.msg import Msg

from giornata.bus.streams import is_full
from giornata.bus.work_queue import LaterLeaderError, QueueConsumer
from giornata.retries import error_code
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
from giornata.wire.workers import QueueState, RowProgress, ServiceName, ServiceState
from giornata_router.job_context import RouterContext
from giornata_router.job_runner import HeldJob, carry, end_unheld, heed_record
from giornata_router.rules import job_records
from giornata_router.rules.admission import RETRY_AFTER_S, QueueLimiter

# The line that the configuration names, and its kinds, which are fitted beside the event loop.


log = structlog.get_logger(__name__)


# What the work queue delivers to the leader: taken as it comes, and asked for again where some of it was
# lost.


AUDIT_S = 30.0
"""How often the queue is asked for messages that were delivered and lost on their way."""
SETTLED_S = 5.0
"""Time in which a message that JetStream has delivered arrives, if it does."""
AGAIN_S = 1.0
"""Time after which a queue that does not answer is asked again."""


class Deliveries:
    """The jobs of one priority. `take` is given each message, `look` is called after it.

    `arrived` counts the messages up to a sequence number that are held.
    """

    def __init__(
        self,
        consumer: QueueConsumer,
        take: Callable[[Msg], Awaitable[None]],
        look: Callable[[], None],
        arrived: Callable[[int], int],
    ) -> None:
        self._consumer, self._take, self._look, self._arrived = consumer, take, look, arrived
        self.behind = 1
        """Messages that were in the queue when it was taken over, and have not come yet."""
        self.ended = 0
        """Jobs that were acknowledged."""

    def again(self) -> None:
        """Have everything delivered again that is not acknowledged."""
        self._consumer.again()

    async def end(self) -> None:
        """The leader steps down."""
        await self._consumer.end()

    async def consume(self) -> None:
        """Take messages; runs for ever.

        Raises:
            LaterLeaderError: another router has begun to lead.
        """
        while True:
            try:
                self.behind = await self._consumer.begin()
                async with aclosing(self._consumer.messages()) as messages:
                    self._look()
                    async for message in messages:
                        await self._take(message)
                        self.behind -= 1
                        self._look()
            except LaterLeaderError:
                log.warning("later_leader", priority=self._consumer.priority)
                raise
            except nats.errors.Error as error:
                log.warning("queue_unreachable", error=repr(error))
                await asyncio.sleep(AGAIN_S)  # the client is reconnecting; there is nothing to wait on

    async def audit(self) -> None:
        """Have delivered again what was delivered and did not arrive: its server may have died on the way. For ever."""
        while True:
            await asyncio.sleep(AUDIT_S)
            try:
                count, last = await self._consumer.delivered()
            except nats.errors.Error as error:
                log.warning("queue_not_audited", error=repr(error))
                continue
            ended = self.ended
            await asyncio.sleep(SETTLED_S)
            if count > self._arrived(last) + self.ended - ended:
                log.warning("deliveries_lost", priority=self._consumer.priority)
                self._consumer.again()


# Messages of the work queue that this version cannot read: another version accepted them, or they are
# damaged.


KEPT_S: Final = 24 * 3600.0
"""An unreadable message is kept for the longest budget. No client waits after that, and the record is gone too."""


class UnreadableMessages:
    """Holds messages without a place in the queue, for a leader that can read them.

    `tasks` owns the wait for the end.
    """

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._held: dict[int, Msg] = {}
        """The messages, by their sequence number in the stream."""

    def __len__(self) -> int:
        return len(self._held)

    def count(self, subject: str, last: int) -> int:
        """Messages of a subject that are held, up to sequence number `last`."""
        return sum(s <= last and message.subject == subject for s, message in self._held.items())

    def hold(self, message: Msg, error: GiornataError) -> None:
        """Put a message aside, and tell of it once."""
        sequence = message.metadata.sequence.stream
        if sequence not in self._held:
            log.error("job_unreadable", job=_job_id(message), sequence=sequence, error=str(error))
            self._tasks.create_task(self._end(sequence), name="unreadable")
        self._held[sequence] = message

    async def _end(self, sequence: int) -> None:
        """Remove a message when the job's budget is surely over."""
        await asyncio.sleep(KEPT_S)
        message = self._held.pop(sequence)
        log.error("unreadable_job_removed", job=_job_id(message), sequence=sequence)
        try:
            await message.term()
        except nats.errors.Error as error:  # the next leader removes it
            log.warning("unreadable_job_not_removed", sequence=sequence, error=repr(error))


def _job_id(message: Msg) -> str | None:
    return (message.headers or {}).get(IDEMPOTENCY_HEADER)


# The work queue: accepting jobs durably, holding all of them in memory, and carrying as many as the fleet
# computes.


LOOK_S = 0.25
"""How often the window is fitted to the fleet, and budgets are looked at; telemetry comes too often for that."""
CATCH_UP_S = 5.0
"""Limit of the time after a takeover in which no new job is begun: until all are known, no order is fair."""
ENDED_AT_ONCE = 64
"""Jobs that are ended side by side without being carried: cancelled ones, and those with a budget that is over."""
_MESSAGES_EXCEEDED = 10077


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
        self._begun = {row.job_id for state in tools.dispatch.placement.fleet.all() for row in _rows(state)}
        """Jobs that workers have had since before the queue was taken over."""
        self._unreadable = UnreadableMessages(walks)
        self._ended = False
        self._ending = asyncio.Semaphore(ENDED_AT_ONCE)
        self._deliveries = {
            priority: Deliveries(
                QueueConsumer(bus.client, bus.jetstream, priority, epoch),
                self._take,
                self._fill,
                partial(self._arrived, priority),
            )
            for priority in Priority
        }

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
                self._subject(job.priority), codec.encode(job), headers={IDEMPOTENCY_HEADER: job.job_id}
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

    def _subject(self, priority: Priority) -> str:
        return subjects.jobs(priority)

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
        for deliveries in self._deliveries.values():
            deliveries.again()
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
                for priority, deliveries in self._deliveries.items():
                    tasks.create_task(deliveries.consume(), name=f"consume-{priority}")
                    tasks.create_task(deliveries.audit(), name=f"audit-{priority}")
        finally:
            self._ended = True
            for deliveries in self._deliveries.values():
                await deliveries.end()

    def _arrived(self, priority: Priority, last: int) -> int:
        """Messages of a priority that are held, up to sequence number `last`."""
        jobs = (held for held in self._held.values() if held.job.priority is priority)
        arrived = sum(0 < held.sequence <= last for held in jobs)
        return arrived + self._unreadable.count(self._subject(priority), last)

    async def _follow(self) -> None:
        """Fit the window to the fleet, end jobs that wait for longer than they may, and have lasting states written."""
        fleet = self._tools.dispatch.placement.fleet
        while True:
            now, ready = time.monotonic(), fleet.ready(ServiceName.DENOISER)
            self._window.resize(sum(state.worker.capacity_rows for state in ready if state.worker))
            self._end_waiting(self._waiting.overdue(now))
            for walk in (held.walk for held in self._carried.values()):
                if walk is not None and walk.unwritten(now):
                    self._start(walk.write_state(), name="state")
            self._fill()
            await asyncio.sleep(LOOK_S)

    async def _take(self, message: Msg) -> None:
        """Hold a job that was delivered, maybe once more."""
        try:
            job = codec.decode(Job, message.data)
        except GiornataError as error:
            self._unreadable.hold(message, error)
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
        if now < self._caught_up_by_s and any(one.behind > 0 for one in self._deliveries.values()):
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
                self._start(self._end(self._held[job.job_id]), name="end")

    async def _end(self, held: HeldJob) -> None:
        async with self._ending:
            ended = await self._try(held)
        await self._settle(held, ended=ended)

    async def _carry(self, held: HeldJob) -> None:
        await self._settle(held, ended=await self._try(held))

    async def _try(self, held: HeldJob) -> bool:
        self._carried[held.job.job_id] = held
        self._tools.forecasting.begin(held.job)
        try:
            return await carry(self._tools, held)
        finally:
            del self._carried[held.job.job_id]
            self._window.end(held.job)
            self._tools.forecasting.prepared(held.job.job_id)

    async def _settle(self, held: HeldJob, *, ended: bool) -> None:
        """Give the job's place back, or let it wait again after a while."""
        if ended:
            self._deliveries[held.job.priority].ended += 1
            self._release(held)
        self._fill()
        if not ended:
            await asyncio.sleep(held.pause_s)
            self._waiting.join(held.job)
            self._fill()


def _rows(state: ServiceState) -> Iterable[RowProgress]:
    return (*state.worker.running, *state.worker.waiting) if state.worker else ()
