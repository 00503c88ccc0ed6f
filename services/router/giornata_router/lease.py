"""The lease that makes one router active, and what its holder knows of it without asking.

Why it is safe without clocks that agree: `docs/adr/0004-queue-and-lease.md`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import nats.errors
import structlog
from nats.js import JetStreamContext
from nats.js.errors import KeyNotFoundError
from nats.js.kv import KV_DEL, KeyValue

from giornata.bus.answering import UnansweredError
from giornata.bus.streams import LEASE_TTL_S
from giornata.wire.messages import Epoch
from giornata.wire.stores import LEASES, bucket_stream
from giornata_router.rules.tenure import LeaseEntry, LeaseWatch

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
    """Whether this router leads: from taking the lease until the lease must have ended, or was lost or given up."""

    def __init__(self, clock: Clock = awake_or_not) -> None:
        self._clock = clock
        self._epoch: Epoch | None = None
        self._until_s = 0.0

    @property
    def leads(self) -> bool:
        """Whether it may act now."""
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
