"""Registered templates as both doors use them: kept with their picture, recorded, named by edits, forgotten."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, replace

import structlog

from giornata import retries
from giornata.blobs import BlobStore, refer
from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.records import TemplateRecords
from giornata.shares import has_room
from giornata.wire import subjects, templates
from giornata.wire.errors import ServiceUnavailable, TemplateLimit, TemplateNotFound
from giornata.wire.jobs import TAKE_OVER_S
from giornata.wire.messages import RemoveTemplate, TemplateRequest
from giornata.wire.templates import TemplateRecord
from giornata_gateway.config import GatewayConfig
from giornata_gateway.fleet import FleetListener
from giornata_gateway.intake.rules.forms import TemplateForm
from giornata_gateway.jobs.preparation import EditOrder

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class TemplateRegistry:
    """The tenants' templates."""

    config: GatewayConfig
    bus: Bus
    blobs: BlobStore
    records: TemplateRecords
    fleet: FleetListener
    tasks: asyncio.TaskGroup
    """Owns what outlives a request: forgetting a template whose registration failed."""

    async def register(
        self, tenant: str, image: bytes, form: TemplateForm, deadline: Deadline
    ) -> TemplateRecord:
        """Keep a picture and have it recorded; a refusal keeps nothing. The same registration again renews it."""
        card = self.fleet.choose(form.model)
        now_s = int(time.time())
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
            expires_s=now_s + self.config.template_ttl_s,
        )
        await self._check_room(tenant, name, len(image))
        known = not await self.records.create(record)  # before the picture that it leads to
        if known:
            await self.records.change(
                tenant, name, lambda now: templates.registered_again(now, record.image, record.expires_s)
            )
        request = TemplateRequest(template=record, remaining_ms=deadline.remaining_ms())
        try:
            await self.blobs.put(record.image.key, image, self._picture_s)
            attempts = retries.soon(ServiceUnavailable, self.config.submit_window_s)
            recorded: TemplateRecord = await attempts(
                self.bus.call, subjects.TEMPLATE, request, TemplateRecord, deadline
            )
        except BaseException:
            if not known:
                self.tasks.create_task(self._forget(record), name=f"forget-{name}")
            raise
        log.info("template_registered", template=name, tenant=tenant, known=known)
        return recorded

    async def get(self, tenant: str, template_id: str) -> TemplateRecord:
        """A tenant's template; TemplateNotFound, too, where it has expired or is another tenant's."""
        record = await self.records.get(tenant, template_id)
        if record.expires_s <= time.time():
            raise TemplateNotFound(received=template_id)
        return record

    async def settled(self, tenant: str, template_id: str, deadline: Deadline) -> TemplateRecord:
        """A tenant's template once it is recorded or could not be, or as it is at the deadline.

        TemplateNotFound is raised as by :meth:`get`, and where it is deleted meanwhile.
        """
        await self.get(tenant, template_id)
        return await self.records.until(tenant, template_id, lambda record: record.state.settled, deadline)

    async def of(self, tenant: str) -> list[TemplateRecord]:
        """A tenant's templates, the newest first."""
        now_s = time.time()
        found = [record for record in await self.records.all_of(tenant) if record.expires_s > now_s]
        return sorted(found, key=lambda record: (record.created_s, record.template_id), reverse=True)

    async def delete(self, tenant: str, template_id: str) -> None:
        """Forget the template that :meth:`get` finds, and its recording; edits that have begun end as before."""
        record = await self.get(tenant, template_id)
        await self.records.delete(record)
        await self.blobs.renew(record.image, self._edit_s)
        if record.template_key is not None:
            message = RemoveTemplate(tenant=tenant, template_key=record.template_key)
            await self.bus.publish(subjects.TEMPLATE_REMOVED, message)
        log.info("template_deleted", template=template_id, tenant=tenant)

    async def applied(self, order: EditOrder) -> EditOrder:
        """`order` with the picture, the model and the size of the template that it names; the template is renewed.

        Raises:
            TemplateNotFound: as :meth:`get`, or its picture is gone.
            TemplateMismatch: the order names another model or size, or a part of the picture.
        """
        if order.template_id is None:
            return order
        tenant, name = order.tenant.name, order.template_id
        record = await self.get(tenant, name)
        parameters = templates.applied(record, order.parameters)
        if not await self.blobs.renew(record.image, self._picture_s):
            raise TemplateNotFound(
                "The template's picture is no longer in the blob store.",
                received=name,
                accepted="register it again",
            )
        life_s = self.config.template_ttl_s
        await self.records.change(tenant, name, lambda known: templates.renewed(known, time.time(), life_s))
        return replace(order, image=record.image, parameters=parameters)

    @property
    def _edit_s(self) -> int:
        """The longest an edit can take, including a takeover by another router."""
        return int(self.config.job_budget_s) + TAKE_OVER_S

    @property
    def _picture_s(self) -> int:
        """A picture outlives its record by an edit that has begun."""
        return self.config.template_ttl_s + self._edit_s

    async def _check_room(self, tenant: str, template_id: str, size_bytes: int) -> None:
        """Raise TemplateLimit where the tenant has no room for another template; it may send a known one again.

        Registrations at the same time may exceed the limit by their number.
        """
        names, most = {record.template_id for record in await self.of(tenant)}, self.config.max_templates
        if template_id in names:
            return
        if len(names) >= most:
            accepted = f"at most {most}; delete one, or wait until one expires"
            raise TemplateLimit(received=f"{len(names) + 1} templates", accepted=accepted)
        held = Counter[str]()
        for record in (await self.records.bucket.everything()).values():
            held[record.tenant] += record.image.size_bytes
        capacity = self.config.max_template_bytes
        if not has_room(held, tenant, size_bytes, capacity, alone=self.config.api_keys_file is None):
            raise TemplateLimit(
                "There is no room for another template of this tenant.",
                received=f"{size_bytes} bytes beside {held[tenant]} of this tenant's and {held.total()} of all",
                accepted=f"{capacity} bytes, shared by all tenants; delete one, or wait until one expires",
            )

    async def _forget(self, record: TemplateRecord) -> None:
        try:
            await self.records.delete(record)
            await self.blobs.delete(record.image)
        except Exception:  # the task's edge: logged; both expire
            log.exception("forget_failed", template=record.template_id)
