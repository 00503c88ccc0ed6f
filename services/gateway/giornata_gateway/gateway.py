"""What both doors work with, and the one way by which an edit is admitted."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from giornata.blobs import BlobStore
from giornata.bus import streams
from giornata.bus.bus import Bus
from giornata.wire.errors import InputLost, ResultExpired
from giornata.wire.jobs import BlobRef, Job
from giornata_gateway.config import GatewayConfig
from giornata_gateway.fleet.metrics import Metrics
from giornata_gateway.fleet.watch import FleetListener
from giornata_gateway.intake.departure import Departure
from giornata_gateway.intake.key_file import KeyFile
from giornata_gateway.intake.memory import Memory
from giornata_gateway.intake.quotas import Quotas
from giornata_gateway.intake.rules.places import Places, Stay
from giornata_gateway.intake.rules.tenants import DEFAULT_TENANT, Tenant, tenant_of
from giornata_gateway.jobs.ends import JobEnds
from giornata_gateway.jobs.ledger import JobLedger
from giornata_gateway.jobs.preparation import EditOrder, Preparation, Prepared
from giornata_gateway.jobs.registration import Registration
from giornata_gateway.jobs.submission import AwaitedJob, Submission


@dataclass(frozen=True)
class Admitted:
    """An edit that may be submitted, and its stay."""

    prepared: Prepared
    stay: Stay
    started_s: float = field(default_factory=time.monotonic)

    def submitting(self) -> None:
        """The job is on its way. From here on a new job with an idempotency key outlives its request."""
        self.stay.lasting = self.prepared.shared and not self.prepared.known

    def accepted(self, job: Job, *, awaited: bool) -> None:
        """The edit has become `job`. Leaving cancels a job that is `awaited` and has no idempotency key."""
        self.stay.repeated = self.prepared.known or job is not self.prepared.job
        self.stay.lasting = not self.stay.repeated and (self.prepared.shared or not awaited)

    def carried_out(self) -> None:
        """The edit is done. Its duration, unless it was repeated, tells refused requests when to come again."""
        self.stay.seconds = None if self.stay.repeated else time.monotonic() - self.started_s


@dataclass(frozen=True)
class Gateway:
    """Everything a request needs, opened by the service."""

    config: GatewayConfig
    bus: Bus
    blobs: BlobStore
    fleet: FleetListener
    keys: KeyFile | None
    """None where no API key is asked for."""
    places: Places
    """For pictures in progress."""
    quotas: Quotas
    watchers: Places
    """For event streams that look on."""
    uploads: Memory
    """Pictures on their way into the blob store."""
    answers: Memory
    """Pictures on their way to clients."""
    ledger: JobLedger
    ends: JobEnds
    preparation: Preparation
    submission: Submission
    registration: Registration
    metrics: Metrics
    departure: Departure = field(default_factory=Departure)

    def tenant(self, key: str | None) -> Tenant:
        """The tenant that asks.

        Raises:
            Unauthorized: keys are asked for and `key` is none of them.
        """
        config = self.config
        defaults = Tenant(DEFAULT_TENANT, config.tenant_in_progress, config.tenant_per_minute)
        return tenant_of(key, None if self.keys is None else self.keys.current, defaults)

    async def admit(self, order: EditOrder, key: str | None, tenant: Tenant, held: ExitStack) -> Admitted:
        """The job of an order, admitted and prepared, or the job that `key` led to before; submit it at once.

        Args:
            order: of `tenant`.
            key: the idempotency key.
            tenant: whose quotas count.
            held: keeps the edit's places until it is closed.

        Raises:
            GiornataError: why the order is refused.
        """
        order = await order.identified(key)
        known = await self.submission.known(order)
        if known is not None:  # nothing is computed, and its pictures may be gone
            return Admitted(known, held.enter_context(self.places.held()))
        await self.preparation.check_blobs(order)
        started_s = time.monotonic()
        stay = held.enter_context(self.stay(tenant, order.parameters.n, order.job_id, order.longest_s))
        return Admitted(
            await self.preparation.prepare(await self.registration.applied(order)), stay, started_s
        )

    async def submit(self, admitted: Admitted) -> Job:
        """Have a job accepted; the one that is carried out, which with an idempotency key may be an earlier one.

        Raises:
            GiornataError: why it was not accepted.
        """
        admitted.submitting()
        job = await self.submission.submit(admitted.prepared)
        admitted.accepted(job, awaited=False)
        return job

    @asynccontextmanager
    async def awaited(self, admitted: Admitted) -> AsyncIterator[AwaitedJob]:
        """A job while its request waits. Leaving cancels it, unless it has an idempotency key."""
        admitted.submitting()
        async with self.submission.awaited(admitted.prepared) as awaited:
            admitted.accepted(awaited.job, awaited=True)
            yield awaited

    @contextmanager
    def stay(self, tenant: Tenant, pictures: int, name: str, longest_s: float) -> Iterator[Stay]:
        """Hold places for pictures that `tenant` asks for while inside.

        Args:
            tenant: whose pictures in progress they are, too.
            pictures: how many.
            name: names the job, or the registration of a template.
            longest_s: how long the tenant has them in progress at most.

        Raises:
            GiornataError: the gateway or the tenant has no room for them.
        """
        self.places.check(pictures)
        counted = self.quotas.enter(tenant, pictures, name, longest_s)
        with self.places.held(pictures) as stay:
            try:
                yield stay
            finally:
                if counted and not stay.lasting:
                    self.quotas.leave(name)

    def depart(self) -> None:
        """No request comes any more: send the requests away that only look on."""
        self.departure.begun.set()
        self.ends.abandon(watchers_only=True)

    def close(self) -> None:
        """Time is over: admit nothing more, and send every waiting request away."""
        self.places.closed = True
        self.ends.abandon()

    async def restore(self) -> None:
        """Make sure of the streams. The event stream lives in memory and is gone after a restart of NATS."""
        config = self.config
        await streams.ensure(self.bus.jetstream, replicas=config.replicas, events_ttl_s=config.result_ttl_s)

    async def picture(self, ref: BlobRef) -> bytes:
        """A finished picture.

        Raises:
            ResultExpired: its time in the store is over.
        """
        try:
            return await self.blobs.get(ref)
        except InputLost as error:
            raise ResultExpired from error
