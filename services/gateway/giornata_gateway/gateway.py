"""What both doors work with."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from giornata.blobs import BlobStore
from giornata.bus import streams
from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.wire.errors import InputLost, ResultExpired
from giornata.wire.jobs import BlobRef, Job
from giornata_gateway.config import GatewayConfig
from giornata_gateway.fleet.metrics import Metrics
from giornata_gateway.fleet.watch import FleetWatch
from giornata_gateway.intake.departure import Departure
from giornata_gateway.intake.key_file import KeyFile
from giornata_gateway.intake.memory import Memory
from giornata_gateway.intake.quotas import Quotas
from giornata_gateway.intake.rules.admission import Admission
from giornata_gateway.intake.rules.tenants import DEFAULT_TENANT, Tenant, tenant_of
from giornata_gateway.jobs.preparation import Order, Prepared
from giornata_gateway.jobs.registration import Registration
from giornata_gateway.jobs.sharing import Sharing
from giornata_gateway.jobs.submission import Held, Submission
from giornata_gateway.jobs.waiting import Waiting


@dataclass
class Place:
    """An edit that holds its places in the admission."""

    started_s: float = field(default_factory=time.monotonic)
    seconds: float | None = None
    """How long the edit took, once it was carried out."""
    lasting: bool = False
    """Its tenant has the pictures in progress until the job's end is heard, not only while the place is held."""
    repeated: bool = False
    """The job was accepted for an earlier request with the same idempotency key."""

    def submitting(self, prepared: Prepared) -> None:
        """The job is on its way; one with an idempotency key is carried out whoever leaves from here on."""
        self.lasting = prepared.job.fingerprint is not None and not prepared.known

    def accepted(self, prepared: Prepared, job: Job, *, awaited: bool) -> None:
        """What was prepared has become `job`; `awaited` says that without an idempotency key leaving calls it off."""
        self.repeated = prepared.known or job is not prepared.job
        self.lasting = not self.repeated and not (awaited and job.fingerprint is None)

    def carried_out(self) -> None:
        """The edit was done; its duration, unless it was repeated, tells those who are refused when to come again."""
        self.seconds = None if self.repeated else time.monotonic() - self.started_s


@dataclass(frozen=True)
class Gateway:
    """Everything a request needs, opened by the service."""

    config: GatewayConfig
    bus: Bus
    blobs: BlobStore
    fleet: FleetWatch
    waiting: Waiting
    keys: KeyFile | None
    """None where nobody is asked for an API key."""
    admission: Admission
    """Of pictures in progress."""
    quotas: Quotas
    """Of each tenant."""
    watchers: Admission
    """Of event streams that look on."""
    uploads: Memory
    """Pictures on their way into the blob store."""
    answers: Memory
    """Pictures on their way to clients."""
    submission: Submission
    sharing: Sharing
    registration: Registration
    metrics: Metrics
    departure: Departure = field(default_factory=Departure)

    def tenant(self, key: str | None) -> Tenant:
        """Who asks; Unauthorized where keys are asked for and `key` is none of them."""
        config = self.config
        defaults = Tenant(DEFAULT_TENANT, config.tenant_in_progress, config.tenant_per_minute)
        return tenant_of(key, None if self.keys is None else self.keys.current, defaults)

    async def prepare(self, order: Order) -> Prepared:
        """A job of `order`, with the picture of the template that it names; submit it at once.

        Raises:
            GiornataError: why the order is refused.
        """
        return await self.submission.prepare(await self.registration.applied(order))

    async def submit(self, prepared: Prepared, place: Place) -> Job:
        """Have a job accepted; the one that is carried out, which with an idempotency key may be an earlier one.

        Raises:
            GiornataError: why it was not accepted.
        """
        place.submitting(prepared)
        if prepared.job.fingerprint is None:
            job = await self.submission.submit(prepared.job)
        else:
            job = await self.sharing.submit(prepared)
        place.accepted(prepared, job, awaited=False)
        return job

    @asynccontextmanager
    async def held(self, prepared: Prepared, place: Place) -> AsyncIterator[Held]:
        """A job while somebody waits for it; only where it has no idempotency key, leaving calls it off."""
        place.submitting(prepared)
        shared = prepared.job.fingerprint is not None
        async with (self.sharing if shared else self.submission).held(prepared) as held:
            place.accepted(prepared, held.job, awaited=True)
            yield held

    @contextmanager
    def place(self, tenant: Tenant, rows: int, name: str, longest_s: float) -> Iterator[Place]:
        """Hold places for pictures that `tenant` asks for while inside.

        Args:
            tenant: whose pictures in progress they are, too.
            rows: pictures.
            name: of the job, or of what else is done.
            longest_s: how long the tenant has them in progress at most.

        Raises:
            GiornataError: the gateway or the tenant has no room for them.
        """
        self.admission.check(rows)
        counted = self.quotas.enter(tenant, rows, name, longest_s)
        with self.waiter(rows) as place:
            try:
                yield place
            finally:
                if counted and not place.lasting:
                    self.quotas.leave(name)

    @contextmanager
    def waiter(self, rows: int = 1) -> Iterator[Place]:
        """Hold places that count for no tenant: for who waits for a job of before, nothing is computed."""
        self.admission.enter(rows)
        place = Place()
        try:
            yield place
        finally:
            self.admission.leave(rows, place.seconds)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hold the place of an event stream while inside; TooManyRequests where there is none."""
        self.watchers.enter(1)
        try:
            yield
        finally:
            self.watchers.leave(1)

    def depart(self) -> None:
        """Nobody comes any more: send those away who only look on."""
        self.departure.begun.set()
        self.waiting.abandon(watchers_only=True)

    def close(self) -> None:
        """Time is over: admit nothing more, and send everybody away who still waits."""
        self.admission.closed = True
        self.waiting.abandon()

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
