"""From an order to a job whose pictures lie in the blob store; nothing of a refused order stays there."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field

import structlog

from giornata.blobs import BlobStore
from giornata.deadlines import Deadline
from giornata.wire.jobs import TAKE_OVER_S, BlobRef, Job, Priority
from giornata.wire.requests import MAX_SEED, EditParameters, resolve
from giornata_gateway.fleet.watch import FleetWatch
from giornata_gateway.intake.rules.forms import missing_image
from giornata_gateway.views.catalog import choose_card

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Order:
    """An edit that somebody asked for, authenticated and well-formed."""

    parameters: EditParameters
    image: bytes | BlobRef | None
    """None until the picture of `template_id` is put here."""
    mask: bytes | BlobRef | None
    tenant: str
    priority: Priority
    deadline: Deadline
    traceparent: str | None = None
    template_id: str | None = None
    """The registered template that is edited."""
    weight: float = 1.0
    """Of its tenant."""
    job_id: str = field(default_factory=lambda: f"job_{secrets.token_urlsafe(18)}")
    """Of the job that it becomes; with an idempotency key, the one that the key leads to."""
    fingerprint: str | None = None
    """Given with an idempotency key; see :func:`~giornata_gateway.intake.rules.idempotency.fingerprint`."""

    @property
    def longest_s(self) -> float:
        """Seconds after which its job has ended, whatever happens."""
        return self.deadline.remaining_s() + TAKE_OVER_S


@dataclass(frozen=True)
class Prepared:
    """A job that is ready to be submitted; it holds no pictures."""

    job: Job
    deadline: Deadline
    known: bool = False
    """It was accepted before, under the same idempotency key."""


class Preparation:
    """Makes jobs of orders. `tasks` owns what must outlive a request: forgetting the pictures of one that failed."""

    def __init__(
        self,
        blobs: BlobStore,
        fleet: FleetWatch,
        tasks: asyncio.TaskGroup,
        *,
        gateway: str,
        result_ttl_s: int,
    ) -> None:
        self._blobs = blobs
        self._fleet = fleet
        self._tasks = tasks
        self._gateway = gateway
        self._result_ttl_s = result_ttl_s

    async def prepare(self, order: Order) -> Prepared:
        """Resolve the parameters and store the pictures.

        Raises:
            GiornataError: why the order is refused.
        """
        if order.image is None:
            raise missing_image()
        card = choose_card(self._fleet.cards(), order.parameters.model, self._fleet.missing())
        parameters = resolve(order.parameters, card, secrets.randbelow(MAX_SEED + 1))
        # two requests with one idempotency key are one job, and each has an upload of its own, which it can forget
        folder = f"{order.tenant}/{order.job_id}/{secrets.token_urlsafe(9)}"
        try:
            image = await self._stored(order, f"{folder}/image", order.image)
            mask = None if order.mask is None else await self._stored(order, f"{folder}/mask", order.mask)
        except BaseException:
            self._tasks.create_task(self._forget_folder(folder), name=f"forget-{order.job_id}")
            raise
        job = Job(
            job_id=order.job_id,
            tenant=order.tenant,
            gateway=self._gateway,
            priority=order.priority,
            model=card.name,
            model_digest=card.digest,
            parameters=parameters,
            image=image,
            mask=mask,
            template_id=order.template_id,
            budget_ms=order.deadline.remaining_ms(),
            result_ttl_s=self._result_ttl_s,
            traceparent=order.traceparent,
            weight=order.weight,
            fingerprint=order.fingerprint,
        )
        return Prepared(job, order.deadline)

    async def forget(self, job: Job) -> None:
        """Delete the pictures that were stored for a job; claim checks of its caller stay."""
        own = f"{job.tenant}/{job.job_id}/"
        await self._blobs.delete(*(ref for ref in (job.image, job.mask) if ref and ref.key.startswith(own)))

    async def _stored(self, order: Order, key: str, data: bytes | BlobRef) -> BlobRef:
        if isinstance(data, BlobRef):
            return data
        ttl_s = self._result_ttl_s + int(order.deadline.remaining_s()) + 1
        return await self._blobs.put(key, data, ttl_s)

    async def _forget_folder(self, folder: str) -> None:
        """Delete what may have been stored: a put that was cancelled may have arrived."""
        keys = (f"{folder}/{name}" for name in ("image", "mask"))
        try:
            await self._blobs.delete(*(BlobRef(key=key, size_bytes=0, sha256="") for key in keys))
        except Exception:  # the task's edge: logged; the blobs end by their time
            log.exception("forget_failed", folder=folder)
