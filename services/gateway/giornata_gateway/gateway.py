"""The gateway's parts that both doors share, and the one way by which an edit is admitted."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import Final, TypeVar

from giornata.api_keys import DEFAULT_TENANT, TenantLimits
from giornata.blobs import BlobStore
from giornata.bus import streams
from giornata.bus.bus import Bus, state_of
from giornata.deadlines import Deadline
from giornata.records import LoraRecords, TemplateRecords, WebhookRecords
from giornata.shares import SharedPool
from giornata.wire.errors import InputLost, ResultExpired, TooManyStreams
from giornata.wire.jobs import TAKE_OVER_S, BlobRef
from giornata.wire.messages import DoneEvent, MaskParameters
from giornata.wire.workers import ServiceName, ServiceState
from giornata_gateway.admission import (
    GRACE_S,
    AdmissionSlot,
    ByteReservation,
    ConcurrencyLimiter,
    KeyFile,
    MemoryLimiter,
    Quotas,
    Tenant,
    tenant_of,
)
from giornata_gateway.config import GatewayConfig
from giornata_gateway.fleet import FleetListener, StorageProbe
from giornata_gateway.jobs.preparation import (
    EditOrder,
    JobPreparer,
    SegmentationClient,
    StandaloneMask,
    check_stored,
)
from giornata_gateway.jobs.resources import Loras, TemplateRegistry
from giornata_gateway.jobs.submission import AdmittedJob, JobEnds, JobLedger, JobSubmitter
from giornata_gateway.metrics import Metrics
from giornata_gateway.webhooks import WebhookService

T = TypeVar("T")

SWALLOWED_S: Final = 0.2
"""A cancellation that has done nothing for so long was lost."""


class GracefulShutdown:
    """Announced once, then begun once; counts the HTTP requests that are still to be answered."""

    def __init__(self) -> None:
        self.announced = asyncio.Event()
        """The gateway is not ready any more, and each answer closes its connection. It still takes requests."""
        self.begun = asyncio.Event()
        """No request comes any more. Requests that any gateway can serve are answered at once."""
        self.asking: Counter[asyncio.BaseTransport] = Counter()
        """Connections on which a request is being answered."""
        self._quiet = asyncio.Event()
        self._quiet.set()

    @contextmanager
    def answering(self, connection: asyncio.BaseTransport) -> Iterator[None]:
        """Count a request while inside: from its head to its answer."""
        self.asking[connection] += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self.asking -= Counter([connection])
            if not self.asking:
                self._quiet.set()

    async def quiet(self, limit_s: float) -> int:
        """Wait until no request is being answered, at most `limit_s`; how many are left."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._quiet.wait()
        return self.asking.total()

    async def before(self, work: Awaitable[T]) -> T | None:
        """Return what `work` returns; None where this gateway begins to leave first, which cancels `work`."""
        working = asyncio.ensure_future(work)
        begun = asyncio.ensure_future(self.begun.wait())
        try:
            await asyncio.wait([working, begun], return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            begun.cancel()
            # Repeated, since Python 3.11's wait_for, which nats-py uses, may swallow a cancellation.
            while not working.done():
                working.cancel()
                await asyncio.wait([working], timeout=SWALLOWED_S)


async def ensure_streams(bus: Bus, config: GatewayConfig) -> None:
    """Create the streams and buckets that gateways need, as :func:`giornata.bus.streams.ensure_shared`."""
    await streams.ensure_shared(
        bus.jetstream,
        replicas=config.replicas,
        events_ttl_s=config.result_ttl_s,
        store_bytes=config.nats_store_bytes,
    )


STRANGERS: Final = 4
"""One of so many connections may be one on which no key was shown yet."""


class Gateway:
    """Everything a request needs.

    `keys` is None where no API key is asked for. `tasks` owns what outlives a request.
    """

    def __init__(
        self,
        config: GatewayConfig,
        bus: Bus,
        blobs: BlobStore,
        *,
        templates: TemplateRecords,
        loras: LoraRecords,
        webhooks: WebhookRecords,
        fleet: FleetListener,
        keys: KeyFile | None,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.config, self.bus, self.blobs, self.fleet, self.keys = config, bus, blobs, fleet, keys
        self.departure = GracefulShutdown()
        self.ledger = JobLedger(bus)
        self.ends = JobEnds(self.ledger, self._ended)
        strangers = max(1, config.max_connections // STRANGERS)
        pools = self.pools = {
            "pictures": SharedPool(config.max_concurrent_rows, self._alone),
            "streams": SharedPool(config.max_streams, self._alone),
            "uploads": SharedPool(config.max_held_bytes, self._alone),
            "answers": SharedPool(config.max_held_bytes, self._alone, grace_s=GRACE_S),
            "connections": SharedPool(max(1, config.max_connections - strangers), self._alone),
            "strangers": SharedPool(strangers, renews=True),
        }
        if blobs.pool is not None:
            pools["blobs"], blobs.pool.weight_of = blobs.pool, self._weight
        self.metrics = Metrics(lambda: len(self.ends), lambda one: self.webhooks.kept(one), pools)  # noqa: PLW0108 - made below
        self.places = ConcurrencyLimiter(pools["pictures"])
        """For pictures in progress."""
        self.quotas = Quotas(
            self.places.estimate_s, lambda *refusal: self.metrics.tenant_refusals.labels(*refusal).inc()
        )
        self.watchers = ConcurrencyLimiter(pools["streams"], "event streams", TooManyStreams)
        """For event streams that look on."""
        self.uploads = MemoryLimiter(pools["uploads"])
        """Pictures on their way into the blob store."""
        self.answers = MemoryLimiter(pools["answers"])
        """Pictures on their way to clients."""
        self.loras = Loras(config, bus, loras)
        self.masks = SegmentationClient(config, bus, blobs, fleet, tasks)
        self.preparation = JobPreparer(config, blobs, fleet, self.loras, self.masks, tasks)
        self.storage = StorageProbe(bus, blobs, told=self.metrics.stores_tried, tasks=tasks)
        self.submission = JobSubmitter(
            config,
            bus,
            fleet,
            self.ledger,
            self.storage,
            self.preparation,
            self.ends,
            tasks,
            self.quotas.leave,
        )
        self.registration = TemplateRegistry(config, bus, blobs, templates, fleet, tasks)
        self.webhooks = WebhookService(
            config,
            bus,
            webhooks,
            self.ledger,
            lambda outcome: self.metrics.webhooks.labels(outcome).inc(),
        )

    def tenant(self, key: str | None) -> Tenant:
        """The tenant that asks with `key`, as :func:`tenant_of` finds it."""
        config = self.config
        defaults = Tenant(DEFAULT_TENANT, config.tenant_in_progress, config.tenant_per_minute)
        return tenant_of(key, None if self.keys is None else self.keys.current, defaults)

    @contextmanager
    def receiving(self, tenant: Tenant, *, counted: bool = True) -> Iterator[ByteReservation]:
        """Receive what `tenant` sends while inside, counted by its bytes.

        What is raised says why the gateway has no room for a picture now, or, where the request is `counted`, why the
        tenant may ask for none.
        """
        self.places.check(tenant)
        if counted:
            self.quotas.check(tenant)
        with self.uploads.growing(tenant) as grow:
            yield grow

    async def admit(
        self, order: EditOrder, key: str | None, held: ExitStack, stay: AdmissionSlot | None = None
    ) -> AdmittedJob:
        """The job of an order, admitted and prepared, or the job that `key` led to before; submit it at once.

        `key` is an idempotency key. `held` keeps the edit's places until it is closed; `stay` are those that it has.
        """
        order = await order.identified(key)
        known = await self.submission.known(order)
        if known is not None:  # nothing is computed, and its pictures may be gone
            stay = stay or held.enter_context(self.places.held(order.tenant))
            return AdmittedJob(known, order.deadline, stay, known=True)
        for name, picture in order.pictures.items():
            await check_stored(self.blobs, name, picture)
        started_s = time.monotonic()
        stay = stay or self.stay_of(order, held)
        if order.template_id is not None:
            image, parameters = await self.registration.applied(
                order.tenant.name, order.template_id, order.parameters
            )
            order = replace(order, image=image, parameters=parameters)
        job = await self.preparation.prepare(order)
        return AdmittedJob(job, order.deadline, stay, started_s=started_s)

    def stay_of(self, order: EditOrder, held: ExitStack, *, always: bool = False) -> AdmissionSlot:
        """Hold the places of an order until `held` is closed; counts and raises as :meth:`stay`."""
        longest_s = order.deadline.remaining_s() + TAKE_OVER_S  # its job has ended then in any case
        stay = self.stay(order.tenant, order.most_rows, order.job_id, longest_s, always=always)
        return held.enter_context(stay)

    @contextmanager
    def stay(
        self, tenant: Tenant, pictures: int, name: str, longest_s: float, *, always: bool = False
    ) -> Iterator[AdmissionSlot]:
        """Hold places for pictures that `tenant` asks for while inside, and count them as in its progress.

        `name` names the job, or the registration of a template. They count at most for `longest_s`; `always` is that of
        :meth:`Quotas.enter`. What is raised says why the gateway or the tenant has no room for them.
        """
        self.places.check(tenant, pictures)
        counted = self.quotas.enter(tenant, pictures, name, longest_s, always=always)
        with self.places.held(tenant, pictures) as stay:
            try:
                yield stay
            finally:
                if counted and not stay.lasting:
                    self.quotas.leave(name)

    @asynccontextmanager
    async def shown(
        self, tenant: Tenant, asked: MaskParameters, image: bytes | BlobRef, deadline: Deadline
    ) -> AsyncIterator[StandaloneMask]:
        """What words name in a picture, see :meth:`SegmentationClient.shown`. While inside it counts as one picture."""
        name = f"mask_{secrets.token_urlsafe(9)}"
        with self.stay(tenant, 1, name, deadline.remaining_s()):
            async with self.masks.shown(tenant.name, asked, image, deadline) as shown:
                del image  # as there
                yield shown

    def depart(self) -> None:
        """No request comes any more: send the requests away that only look on."""
        self.departure.begun.set()
        self.ends.abandon(watchers_only=True)

    def close(self) -> None:
        """Time is over: admit nothing more, and send every waiting request away."""
        self.places.closed = True
        self.ends.abandon()

    async def restore(self) -> None:
        """Make sure of what gateways make. The event stream lives in memory and is gone after a restart of NATS."""
        await ensure_streams(self.bus, self.config)

    def state(self) -> ServiceState:
        """This gateway as its telemetry tells of it."""
        draining = self.departure.announced.is_set()
        ready = not draining and self.bus.client.is_connected
        return state_of(ServiceName.GATEWAY, self.config, ready=ready, draining=draining)

    async def picture(self, ref: BlobRef) -> bytes:
        """A finished picture; ResultExpired where its time in the store is over."""
        try:
            return await self.blobs.get(ref)
        except InputLost as error:
            raise ResultExpired from error

    def _weight(self, tenant: str) -> float:
        limits = {} if self.keys is None else self.keys.current.tenants
        return limits.get(tenant, TenantLimits()).weight or 1.0

    def _alone(self) -> bool:
        """Return whether there is one tenant alone."""
        keys = () if self.keys is None else self.keys.current.keys
        return all(key.tenant == keys[0].tenant for key in keys)

    def _ended(self, event: DoneEvent) -> None:
        self.metrics.job_ended(event, awaited=event.job_id in self.ends)
        self.quotas.leave(event.job_id)
