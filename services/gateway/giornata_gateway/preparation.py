"""From an order to a job whose pictures lie in the blob store; nothing of a refused order stays there."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass

import structlog

from giornata.blobs import BlobStore
from giornata.deadlines import Deadline
from giornata.jobs import BlobRef, Job, Priority
from giornata.requests import MAX_SEED, EditParameters, resolve
from giornata_gateway.catalog import choose_card
from giornata_gateway.fleet_watch import FleetWatch
from giornata_gateway.forms import missing_image

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


@dataclass(frozen=True)
class Prepared:
    """A job that is ready to be submitted; it holds no pictures."""

    job: Job
    deadline: Deadline


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
        job_id = f"job_{secrets.token_urlsafe(18)}"
        try:
            image = await self._stored(order, job_id, "image", order.image)
            mask = None if order.mask is None else await self._stored(order, job_id, "mask", order.mask)
        except BaseException:
            self._tasks.create_task(self._forget_order(order, job_id), name=f"forget-{job_id}")
            raise
        job = Job(
            job_id=job_id,
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
        )
        return Prepared(job, order.deadline)

    async def forget(self, job: Job) -> None:
        """Delete the pictures that were stored for a job; claim checks of its caller stay."""
        own = f"{job.tenant}/{job.job_id}/"
        await self._blobs.delete(*(ref for ref in (job.image, job.mask) if ref and ref.key.startswith(own)))

    async def _stored(self, order: Order, job_id: str, name: str, data: bytes | BlobRef) -> BlobRef:
        if isinstance(data, BlobRef):
            return data
        ttl_s = self._result_ttl_s + int(order.deadline.remaining_s()) + 1
        return await self._blobs.put(_key(order.tenant, job_id, name), data, ttl_s)

    async def _forget_order(self, order: Order, job_id: str) -> None:
        """Delete what may have been stored: a put that was cancelled may have arrived."""
        keys = (_key(order.tenant, job_id, name) for name in ("image", "mask"))
        try:
            await self._blobs.delete(*(BlobRef(key=key, size_bytes=0, sha256="") for key in keys))
        except Exception:  # the task's edge: logged; the blobs end by their time
            log.exception("forget_failed", job_id=job_id)


def _key(tenant: str, job_id: str, name: str) -> str:
    return f"{tenant}/{job_id}/{name}"
