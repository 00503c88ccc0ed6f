"""Registered templates as both doors use them: kept with their picture, recorded, named by edits, forgotten."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from giornata import retries
from giornata.blobs import BlobStore
from giornata.blobs.protocol import refer
from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.records.templates import TemplateRecords
from giornata.wire import subjects, templates
from giornata.wire.errors import ServiceUnavailable, TemplateLimit, TemplateNotFound
from giornata.wire.jobs import TAKE_OVER_S
from giornata.wire.messages import RemoveTemplate, TemplateRequest
from giornata.wire.templates import TemplateRecord
from giornata_gateway.fleet.watch import FleetWatch
from giornata_gateway.jobs.preparation import Order
from giornata_gateway.views.catalog import choose_card
from giornata_gateway.views.templates import TemplateForm

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Lives:
    """How long things are kept, in seconds."""

    template_s: int
    """A template that nobody uses."""
    edit_s: int
    """An edit at the longest, another router's taking it over included: its template's picture stays so long."""

    @classmethod
    def of(cls, template_ttl_s: int, job_budget_s: float) -> Lives:
        """From the configuration."""
        return cls(template_ttl_s, int(job_budget_s) + TAKE_OVER_S)


class Registration:
    """The tenants' templates. `tasks` owns what must outlive a request: forgetting one that failed.

    Args:
        bus: to the router and the denoisers.
        blobs: where pictures are kept.
        records: where templates are.
        fleet: which models are served.
        tasks: see above.
        lives: how long things are kept.
        window_s: how long a registration is tried while no router answers.
        most: templates of a tenant; registrations at the same time may pass it by their number.
        clock: Unix time in seconds.
    """

    def __init__(
        self,
        bus: Bus,
        blobs: BlobStore,
        records: TemplateRecords,
        fleet: FleetWatch,
        *,
        tasks: asyncio.TaskGroup,
        lives: Lives,
        window_s: float,
        most: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._bus, self._blobs, self._records, self._fleet = bus, blobs, records, fleet
        self._tasks, self._lives, self._window_s, self._clock = tasks, lives, window_s, clock
        self._most = most

    async def register(
        self, tenant: str, image: bytes, form: TemplateForm, deadline: Deadline
    ) -> TemplateRecord:
        """Keep a picture and have it recorded. The same registration again renews it.

        Raises:
            GiornataError: why it is refused; then nothing is kept that was not kept before.
        """
        card = choose_card(self._fleet.cards(), form.model, self._fleet.missing())
        now_s = int(self._clock())
        ref = await refer("", image)
        name = templates.template_id(tenant, card, form.size, ref.sha256)
        record = TemplateRecord(
            template_id=name,
            tenant=tenant,
            model=card.name,
            model_digest=card.digest,
            size=form.size,
            image=ref.model_copy(update={"key": f"{tenant}/{name}/image"}),
            created_s=now_s,
            expires_s=now_s + self._lives.template_s,
        )
        await self._check_room(tenant, name)
        known = not await self._entered(record)
        try:
            await self._blobs.put(record.image.key, image, self._picture_s)
            recorded = await self._record(record, deadline)
        except BaseException:
            if not known:
                self._tasks.create_task(self._forget(record), name=f"forget-{name}")
            raise
        log.info("template_registered", template=name, tenant=tenant, known=known)
        return recorded

    async def get(self, tenant: str, template_id: str) -> TemplateRecord:
        """A tenant's template.

        Raises:
            TemplateNotFound: there is none, it has expired, or it is somebody else's, which is not told.
        """
        return self._living(await self._records.get(tenant, template_id))

    async def settled(self, tenant: str, template_id: str, deadline: Deadline) -> TemplateRecord:
        """A tenant's template once it is recorded or could not be, or as it is at the deadline.

        Raises:
            TemplateNotFound: as :meth:`get`, or it is deleted meanwhile.
        """
        await self.get(tenant, template_id)
        return await self._records.until(tenant, template_id, lambda record: record.state.settled, deadline)

    async def of(self, tenant: str) -> list[TemplateRecord]:
        """A tenant's templates, the newest first."""
        now_s = self._clock()
        found = [record for record in await self._records.all_of(tenant) if record.expires_s > now_s]
        return sorted(found, key=lambda record: (record.created_s, record.template_id), reverse=True)

    async def delete(self, tenant: str, template_id: str) -> None:
        """Forget a tenant's template and what was recorded of it. Edits that have begun end as if it were there.

        Raises:
            TemplateNotFound: as :meth:`get`.
        """
        record = await self.get(tenant, template_id)
        await self._records.delete(record)
        await self._blobs.renew(record.image, self._lives.edit_s)
        if record.template_key is not None:
            message = RemoveTemplate(tenant=tenant, template_key=record.template_key)
            await self._bus.publish(subjects.TEMPLATE_REMOVED, message)
        log.info("template_deleted", template=template_id, tenant=tenant)

    async def applied(self, order: Order) -> Order:
        """`order` with the picture, the model and the size of the template that it names; the template is renewed.

        Raises:
            TemplateNotFound: as :meth:`get`, or its picture is gone.
            TemplateMismatch: the order names another model or size, or a part of the picture.
        """
        if order.template_id is None:
            return order
        record = await self.get(order.tenant, order.template_id)
        parameters = templates.applied(record, order.parameters)
        if not await self._blobs.renew(record.image, self._picture_s):
            raise TemplateNotFound(
                "The template's picture is no longer in the blob store.",
                received=order.template_id,
                accepted="register it again",
            )
        await self._records.change(
            order.tenant,
            order.template_id,
            lambda known: templates.renewed(known, self._clock(), self._lives.template_s),
        )
        return replace(order, image=record.image, parameters=parameters)

    @property
    def _picture_s(self) -> int:
        """A picture outlives its record by an edit that has begun."""
        return self._lives.template_s + self._lives.edit_s

    def _living(self, record: TemplateRecord) -> TemplateRecord:
        if record.expires_s <= self._clock():
            raise TemplateNotFound(received=record.template_id)
        return record

    async def _check_room(self, tenant: str, template_id: str) -> None:
        """Whether the tenant may have this template: one that it has already it may send again."""
        names = {record.template_id for record in await self.of(tenant)}
        if template_id not in names and len(names) >= self._most:
            raise TemplateLimit(
                received=f"{len(names) + 1} templates",
                accepted=f"at most {self._most}; delete one, or wait until one expires",
            )

    async def _entered(self, record: TemplateRecord) -> bool:
        """Write the record, before the picture that it leads to; whether it is a new one."""
        if await self._records.create(record):
            return True
        await self._records.change(
            record.tenant,
            record.template_id,
            lambda known: templates.registered_again(known, record.image, record.expires_s),
        )
        return False

    async def _record(self, record: TemplateRecord, deadline: Deadline) -> TemplateRecord:
        """Ask the router, again while there is none."""
        attempts = retries.soon(ServiceUnavailable, self._window_s)
        request = TemplateRequest(template=record, remaining_ms=deadline.remaining_ms())
        return await attempts(self._bus.call, subjects.TEMPLATE, request, TemplateRecord, deadline)

    async def _forget(self, record: TemplateRecord) -> None:
        try:
            await self._records.delete(record)
            await self._blobs.delete(record.image)
        except Exception:  # the task's edge: logged; both end by their time
            log.exception("forget_failed", template=record.template_id)
