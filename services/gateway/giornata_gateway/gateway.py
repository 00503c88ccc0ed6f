"""What both doors work with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from giornata import streams
from giornata.blobs import BlobStore
from giornata.bus import Bus
from giornata.deadlines import Deadline
from giornata.errors import InputLost, ResultExpired
from giornata.jobs import BlobRef
from giornata_gateway.admission import Admission
from giornata_gateway.config import GatewayConfig
from giornata_gateway.fleet_watch import FleetWatch
from giornata_gateway.memory import Memory
from giornata_gateway.metrics import Metrics
from giornata_gateway.preparation import Order, Prepared
from giornata_gateway.registration import Registration
from giornata_gateway.submission import Submission
from giornata_gateway.tenants import tenant_of
from giornata_gateway.waiting import Waiting

log = structlog.get_logger(__name__)


@dataclass
class Place:
    """An edit that holds its places in the admission."""

    started_s: float = field(default_factory=time.monotonic)
    seconds: float | None = None
    """How long the edit took, once it was carried out."""

    def carried_out(self) -> None:
        """The edit was done; its duration tells those who are refused when to come again."""
        self.seconds = time.monotonic() - self.started_s


@dataclass(frozen=True)
class Gateway:
    """Everything a request needs, opened by the service."""

    config: GatewayConfig
    bus: Bus
    blobs: BlobStore
    fleet: FleetWatch
    waiting: Waiting
    admission: Admission
    """Of pictures in progress."""
    watchers: Admission
    """Of event streams that look on."""
    uploads: Memory
    """Pictures on their way into the blob store."""
    answers: Memory
    """Pictures on their way to clients."""
    submission: Submission
    registration: Registration
    metrics: Metrics
    quiet: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a request gives back the last place."""

    def tenant(self, key: str | None) -> str:
        """Who asks; Unauthorized where the key is none of the configured ones."""
        return tenant_of(key, self.config.api_keys.get_secret_value())

    async def prepare(self, order: Order) -> Prepared:
        """A job of `order`, with the picture of the template that it names; submit it at once.

        Raises:
            GiornataError: why the order is refused.
        """
        return await self.submission.prepare(await self.registration.applied(order))

    @contextmanager
    def place(self, rows: int) -> Iterator[Place]:
        """Hold places while inside; TooManyRequests where there are none."""
        self.admission.enter(rows)
        self.quiet.clear()
        place = Place()
        try:
            yield place
        finally:
            self.admission.leave(rows, place.seconds)
            if not self.admission.taken:
                self.quiet.set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hold the place of an event stream while inside; TooManyRequests where there is none."""
        self.watchers.enter(1)
        try:
            yield
        finally:
            self.watchers.leave(1)

    def close(self) -> None:
        """Admit nothing more, and send those away who only look on."""
        self.admission.closed = self.watchers.closed = True
        self.waiting.abandon(watchers_only=True)

    async def idle(self, limit_s: float) -> None:
        """Return when no edit is in progress, or after `limit_s`."""
        if not self.admission.taken:
            return
        try:
            async with asyncio.timeout(limit_s):
                await self.quiet.wait()
        except TimeoutError:
            log.warning("edits_left_behind", rows=self.admission.taken)

    def deadline(self, seconds: float) -> Deadline:
        """`seconds` from now."""
        return Deadline.after_ms(seconds * 1000)

    async def restore(self) -> None:
        """Make sure of the streams: that of the events lives in memory, and is gone after a restart of NATS."""
        config = self.config
        await streams.ensure(self.bus.jetstream, replicas=config.replicas, events_ttl_s=config.result_ttl_s)

    async def picture(self, ref: BlobRef) -> bytes:
        """A finished picture.

        Raises:
            ResultExpired: it was kept for its time.
        """
        try:
            return await self.blobs.get(ref)
        except InputLost as error:
            raise ResultExpired from error
