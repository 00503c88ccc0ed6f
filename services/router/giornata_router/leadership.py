"""One router is active: the lease that makes it so, and what only its holder does.

Why it is safe without clocks that agree: `docs/adr/0004-queue-and-lease.md`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

import nats.errors
import structlog
from nats.js import JetStreamContext
from nats.js.errors import KeyNotFoundError
from nats.js.kv import KV_DEL, KeyValue

from giornata.bus.bus import Bus, UnansweredError
from giornata.bus.streams import LEASE_TTL_S
from giornata.deadlines import Deadline
from giornata.wire import codec, subjects
from giornata.wire.jobs import Assignment, Inspection, Job
from giornata.wire.messages import (
    CancelRows,
    Epoch,
    PrefetchTemplate,
    RecordRequest,
    RunAnswer,
    RunReply,
    RunRequest,
)
from giornata.wire.subjects import LEASES, bucket_stream

MARGIN: Final = 1.1
"""A router waits this much longer than the lease's life: clocks of two machines run at slightly different rates."""


class LeaseEntry(NamedTuple):
    """The lease's entry, as it was read."""

    revision: int
    """0 where there is no entry."""
    free: bool
    """It was given up, or never held: no router acts on it."""


class LeaseWatch:
    """A router's watch over the lease of another. `life_s` is how long its holder acts after a renewal.

    The holder counts its time from before it asks for a renewal, and this router from after it has read the outcome. So
    the lease has ended for its holder when it may be taken here. An entry that is gone without having been given up
    counts as a change: it may have been renewed just before.
    """

    def __init__(self, life_s: float) -> None:
        self._unchanged_s = life_s * MARGIN
        self._seen: tuple[int, float] | None = None

    def see(self, sighting: LeaseEntry, now: float) -> float:
        """Seconds until the lease may be taken if it does not change again; 0 for now."""
        if sighting.free:
            return 0.0
        if self._seen is None or self._seen[0] != sighting.revision:
            self._seen = sighting.revision, now
        return max(0.0, self._seen[1] + self._unchanged_s - now)


RENEW_S: Final = LEASE_TTL_S / 3
"""How often the lease is renewed, and how often a standby looks at it."""

KEY: Final = "router"

Clock = Callable[[], float]

log = structlog.get_logger(__name__)


def awake_or_not() -> float:
    """Seconds by a clock that goes on while the machine is suspended, where there is one."""
    return time.clock_gettime(_CLOCK)


_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class LeaseEndedError(UnansweredError):
    """This router's lease has ended: it acts no more, and another router may."""


class Leadership:
    """The state of leading: from taking the lease until the lease must have ended, or was lost or given up."""

    def __init__(self, clock: Clock = awake_or_not) -> None:
        self._clock = clock
        self._epoch: Epoch | None = None
        self._until_s = 0.0

    @property
    def leads(self) -> bool:
        """Return whether it may act now."""
        return self._epoch is not None and self._clock() < self._until_s

    def begin(self, epoch: Epoch, until_s: float) -> None:
        """Lead until `until_s` by the clock, as the router of `epoch`."""
        self._epoch, self._until_s = epoch, until_s

    def extend(self, until_s: float) -> None:
        """The lease was renewed; what has ended stays ended."""
        if self.leads:
            self._until_s = until_s

    def end(self) -> None:
        """Lead no more."""
        self._epoch = None

    def check(self) -> Epoch:
        """The epoch under which this router acts now.

        Raises:
            LeaseEndedError: it may not act.
        """
        if self._epoch is None or not self.leads:
            raise LeaseEndedError
        return self._epoch


class Lease:
    """The key that one router holds. It tells `leadership` what becomes of it."""

    def __init__(
        self,
        jetstream: JetStreamContext,
        bucket: KeyValue,
        holder: str,
        leadership: Leadership,
        clock: Clock = awake_or_not,
    ) -> None:
        self._jetstream, self._bucket, self._holder = jetstream, bucket, holder.encode()
        self._leadership, self._clock = leadership, clock
        self._watch = LeaseWatch(LEASE_TTL_S)
        self._revision = 0

    async def acquire(self) -> float:
        """Take the lease if no router can hold it; else return in how many seconds to ask again."""
        try:
            sighting = await self._read()
            wait_s = self._watch.see(sighting, self._clock())
            if wait_s == 0:
                await self._take(sighting.revision)
        except nats.errors.Error as error:
            log.debug("lease_not_acquired", error=repr(error))
            return RENEW_S
        return min(wait_s, RENEW_S)

    async def renew(self) -> bool:
        """Hold on for another life; False if that is not certain."""
        if not self._leadership.leads:
            log.warning("lease_ended")
            return False
        asked_s = self._clock()
        try:
            self._revision = await self._bucket.update(KEY, self._holder, last=self._revision)
        except nats.errors.Error as error:
            log.warning("lease_not_renewed", error=repr(error))
            return False
        self._leadership.extend(asked_s + LEASE_TTL_S)
        return self._leadership.leads

    async def release(self) -> None:
        """Give the lease up, so that the next router takes over at once instead of after the lease's life."""
        self._leadership.end()
        try:
            await self._bucket.delete(KEY, last=self._revision)
        except nats.errors.Error as error:
            log.warning("lease_not_released", error=repr(error))

    async def _read(self) -> LeaseEntry:
        try:
            entry = await self._bucket.get(KEY)
        except KeyNotFoundError as missing:
            if missing.entry is not None:
                return LeaseEntry(missing.entry.revision, free=missing.op == KV_DEL)
            stream = await self._jetstream.stream_info(bucket_stream(LEASES))
            return LeaseEntry(0, free=stream.state.last_seq == 0)
        return LeaseEntry(entry.revision or 0, free=False)

    async def _take(self, revision: int) -> None:
        """Write the entry, unless it has changed since `revision`: then another router was faster."""
        stream = await self._jetstream.stream_info(bucket_stream(LEASES))
        created_us = 0 if stream.created is None else int(stream.created.timestamp() * 1e6)
        asked_s = self._clock()
        self._revision = await self._bucket.update(KEY, self._holder, last=revision)
        self._leadership.begin(Epoch(created_us, self._revision), asked_s + LEASE_TTL_S)


Ask = TypeVar("Ask", RunRequest, RecordRequest)
GONE_S: Final = 1.0
"""The server says much sooner that a worker's connection is gone."""


class WorkerClient:
    """The messages to denoisers. Each carries the epoch of the lease, and none is sent after its end."""

    def __init__(self, bus: Bus, leadership: Leadership) -> None:
        self._bus, self._leadership = bus, leadership

    async def run(self, worker: str, request: RunRequest, limit: Deadline) -> RunReply:
        """Ask `worker` to compute rows; raises as :meth:`giornata.bus.bus.Bus.call`, and LeaseEndedError."""
        return await self._ask(subjects.worker(worker, "run"), request, limit)

    async def record(self, worker: str, request: RecordRequest, limit: Deadline) -> RunReply:
        """Ask `worker` to record a template; raises as :meth:`run`."""
        return await self._ask(subjects.worker(worker, "record"), request, limit)

    async def drop(self, job_id: str, assignment: Assignment, *, hand_back: bool = False) -> None:
        """Tell the worker of an attempt to drop its rows, or to hand them back with what it has computed of them."""
        epoch = self._leadership.check()
        message = CancelRows(
            job_id=job_id, attempt=assignment.attempt, epoch=epoch, hand_back=hand_back or None
        )
        await self._bus.publish(subjects.worker(assignment.worker, "cancel"), message)

    async def is_gone(self, job_id: str, assignment: Assignment) -> bool:
        """Tell it again; return whether its connection is gone. It has died then; a frozen one keeps its connection."""
        message = CancelRows(job_id=job_id, attempt=assignment.attempt, epoch=self._leadership.check())
        subject = subjects.worker(assignment.worker, "cancel")
        try:
            await self._bus.client.request(subject, codec.encode(message), timeout=GONE_S)
        except nats.errors.NoRespondersError:
            return True
        except nats.errors.Error:
            pass
        return False

    async def prefetch(self, worker: str, job: Job, inspection: Inspection) -> None:
        """Tell `worker` to load a job's template into memory, and its LoRAs onto the device where there is room."""
        message = PrefetchTemplate(job=job, inspection=inspection, epoch=self._leadership.check())
        await self._bus.publish(subjects.worker(worker, "prefetch"), message)

    async def _ask(self, subject: str, request: Ask, limit: Deadline) -> RunReply:
        told = request.model_copy(update={"epoch": self._leadership.check()})
        reply = await self._bus.call(subject, told, RunReply, limit)
        if reply.answer is RunAnswer.STALE:
            log.error("superseded", subject=subject, epoch=told.epoch)
            self._leadership.end()
            raise LeaseEndedError
        return reply
