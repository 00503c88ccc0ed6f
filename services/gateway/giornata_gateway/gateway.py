"""What both doors work with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from giornata.blobs import BlobStore
from giornata.bus import Bus
from giornata.deadlines import Deadline
from giornata.errors import InputLost, ResultExpired
from giornata.jobs import BlobRef
from giornata_gateway.admission import Admission
from giornata_gateway.config import GatewayConfig
from giornata_gateway.fleet_watch import FleetWatch
from giornata_gateway.metrics import Metrics
from giornata_gateway.submission import Submission
from giornata_gateway.tenants import tenant_of
from giornata_gateway.waiting import Waiting

log = structlog.get_logger(__name__)


@dataclass
class Place:
    """The places that one request holds in the admission."""

    admission: Admission
    rows: int
    started_s: float = field(default_factory=time.monotonic)
    seconds: float | None = None
    """How long the edit took, once it was carried out."""

    def widen(self, rows: int) -> None:
        """Hold `rows` places in all, now that their number is known."""
        self.admission.enter(rows, held=self.rows)
        self.rows = rows

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
    submission: Submission
    metrics: Metrics
    quiet: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a request gives back the last place."""

    def tenant(self, key: str | None) -> str:
        """Who asks; Unauthorized where the key is none of the configured ones."""
        return tenant_of(key, self.config.api_keys.get_secret_value())

    @contextmanager
    def place(self, rows: int) -> Iterator[Place]:
        """Hold places while inside; TooManyRequests where there are none."""
        self.admission.enter(rows)
        self.quiet.clear()
        place = Place(self.admission, rows)
        try:
            yield place
        finally:
            self.admission.leave(place.rows, place.seconds)
            if not self.admission.rows:
                self.quiet.set()

    async def idle(self, limit_s: float) -> None:
        """Return when no edit is in progress, or after `limit_s`."""
        if not self.admission.rows:
            return
        try:
            async with asyncio.timeout(limit_s):
                await self.quiet.wait()
        except TimeoutError:
            log.warning("edits_left_behind", rows=self.admission.rows)

    def deadline(self, seconds: float) -> Deadline:
        """`seconds` from now."""
        return Deadline.after_ms(seconds * 1000)

    async def picture(self, ref: BlobRef) -> bytes:
        """A finished picture.

        Raises:
            ResultExpired: it was kept for its time.
        """
        try:
            return await self.blobs.get(ref)
        except InputLost as error:
            raise ResultExpired from error
