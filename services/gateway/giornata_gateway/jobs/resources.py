"""The LoRAs and ControlNets that requests name, as a job keeps them, and the tenants' registered templates."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Final

import structlog

from giornata.blobs import BlobStore, refer
from giornata.bus.bus import Bus
from giornata.deadlines import Deadline, retry_soon
from giornata.records import BucketMirror, LoraRecords, TemplateRecords, owner_of
from giornata.shares import has_room
from giornata.wire import subjects, templates
from giornata.wire.adapters import (
    CONTROL_IMAGES,
    AskedControl,
    AskedLora,
    ControlCard,
    ControlInput,
    ControlUse,
    LoraUse,
    LoraWait,
)
from giornata.wire.errors import (
    ControlNetNotFound,
    InvalidField,
    LoraLimit,
    LoraMismatch,
    LoraNotFound,
    LoraNotReady,
    ServiceUnavailable,
    TemplateLimit,
    TemplateNotFound,
)
from giornata.wire.jobs import TAKE_OVER_S, BlobRef
from giornata.wire.loras import EVERYONE, LoraRecord, LoraState, PinLora, RemoveLora
from giornata.wire.messages import RemoveTemplate, TemplateRequest
from giornata.wire.models import ModelCard, Task
from giornata.wire.requests import EditParameters, GenerationParameters
from giornata.wire.templates import TemplateRecord
from giornata_gateway.config import GatewayConfig
from giornata_gateway.fleet import FleetListener
from giornata_gateway.rules.forms import TemplateForm

log = structlog.get_logger(__name__)

CONTROLNETS_FIELD: Final = "controlnets"
LORAS_FIELD: Final = "loras"
PROFILED_SCALE: Final = 1.0
"""At which pictures are compared. A LoRA that acts more strongly may change more, and is waited for."""
ANSWER_MS: Final = 10_000
SORTED: Final = 64
"""Tenants whose lists are kept sorted."""


def check_images(asked: Sequence[AskedControl], count: int, task: Task) -> None:
    """Check that the ControlNets of a request see something, and that one of them sees each of `count` control images.

    InvalidField names what is missing, or not used.
    """
    for one in asked:
        if one.image is None and task is Task.GENERATE:
            raise InvalidField(
                f"A generation edits no picture, and so {one.annotator} has nothing to make a control image of.",
                field=f"{CONTROLNETS_FIELD}.image",
                received="none",
                accepted=f"the number of a control image: 0 for {CONTROL_IMAGES[0]}",
            )
        if one.image is not None and one.image >= count:
            raise InvalidField(
                f"The ControlNet {one.model} needs a control image that the request does not bring.",
                field=CONTROL_IMAGES[one.image],
                received=f"{count} control images",
                accepted="a PNG, JPEG or WebP file",
            )
    unused = sorted(set(range(count)) - {one.image for one in asked})
    if unused:
        raise InvalidField(
            f"No ControlNet of the request sees {CONTROL_IMAGES[unused[0]]}.",
            field=CONTROL_IMAGES[unused[0]],
            received="a file",
            accepted=f"leave it out, or name it as image of one of {CONTROLNETS_FIELD}: {unused[0]}",
        )


def control_use(
    asked: AskedControl, card: ModelCard, served: Mapping[str, Sequence[ControlCard]], task: Task
) -> ControlUse:
    """The ControlNet that a request for the model `card` names; `served` are ControlNets by model.

    Raises:
        ControlNetNotFound: the model is served without it; names the models that have it.
        InvalidField: the mode of a union ControlNet is missing or unknown, or another ControlNet has none; or it sees
            the mask, and a generation has none.
    """
    own = {net.name: net for net in served.get(card.name, ())}
    if asked.model not in own:
        raise _not_found(asked.model, card, served)
    net = own[asked.model]
    _check_mode(asked, net)
    if net.sees is ControlInput.MASKED and task is Task.GENERATE:
        raise InvalidField(
            f"The ControlNet {net.name} sees the mask of an edit, and a generation has none.",
            field=f"{CONTROLNETS_FIELD}.model",
            received=net.name,
            accepted="another ControlNet, or an edit",
        )
    return ControlUse.model_validate(vars(asked) | {"digest": net.digest, "sees": net.sees})


def _not_found(name: str, card: ModelCard, served: Mapping[str, Sequence[ControlCard]]) -> ControlNetNotFound:
    own = ", ".join(sorted(net.name for net in served.get(card.name, ())))
    others = sorted(model for model, nets in served.items() if any(net.name == name for net in nets))
    message = f"The model {card.name} ({card.family}) is served without the ControlNet {name}."
    if others:
        message += f" It belongs to {', '.join(others)}."
    return ControlNetNotFound(
        message,
        field=CONTROLNETS_FIELD,
        received=name,
        accepted=own or f"no ControlNet; leave {CONTROLNETS_FIELD} out",
    )


def _check_mode(asked: AskedControl, net: ControlCard) -> None:
    if not net.modes and asked.mode is not None:
        raise InvalidField(
            f"The ControlNet {net.name} has no modes: it is no union.",
            field=f"{CONTROLNETS_FIELD}.mode",
            received=asked.mode,
            accepted="leave mode out",
        )
    if net.modes and (asked.mode is None or asked.mode >= net.modes):
        raise InvalidField(
            f"The ControlNet {net.name} is a union of {net.modes} and needs a mode that it has.",
            field=f"{CONTROLNETS_FIELD}.mode",
            received="none" if asked.mode is None else asked.mode,
            accepted=f"0 to {net.modes - 1}",
        )


def use_of(
    asked: AskedLora, record: LoraRecord, card: ModelCard, wait: LoraWait, join: float | None = None
) -> LoraUse:
    """The LoRA of `record`, as it is now, for a job of the model `card` whose rows wait for it as `wait` says.

    `join` is the share of the steps after which the request has it join, if it says so.

    Raises:
        LoraNotReady: it is still being made, or could not be.
        LoraMismatch: it is for another model, or for another checkpoint of this name.
    """
    canonical = record.canonical
    if record.state is not LoraState.READY or canonical is None:
        raise _not_ready(record)
    if record.model != card.name:
        raise LoraMismatch(
            f"The LoRA {record.lora_id} is for the model {record.model}, and the request for {card.name}.",
            field=LORAS_FIELD,
            received=f"a LoRA for {record.model}",
            accepted=f"a LoRA for {card.name}, or model={record.model}",
        )
    if canonical.model_digest != card.digest:
        raise LoraMismatch(
            f"The LoRA {record.lora_id} was checked against another checkpoint of {card.name} than is served.",
            field=LORAS_FIELD,
            received=f"checkpoint {canonical.model_digest[:12]}",
            accepted=f"checkpoint {card.digest[:12]}: delete the LoRA and upload it again",
        )
    bounded = wait is LoraWait.BOUNDED and 0 <= asked.scale <= PROFILED_SCALE
    allowed = (record.joins_within or 0.0) if bounded else 0.0
    return LoraUse(
        lora_id=record.lora_id,
        sha256=canonical.file.sha256,
        size_bytes=canonical.file.size_bytes,
        rank=canonical.rank,
        modules=canonical.modules,
        text_modules=canonical.text_modules,
        weights=canonical.weights,
        scale=asked.scale,
        joins_within=join or allowed,
    )


def _not_ready(record: LoraRecord) -> LoraNotReady:
    if record.error is not None:
        return LoraNotReady(
            f"The LoRA {record.lora_id} could not be used: {record.error.message}",
            field=LORAS_FIELD,
            received=f"{record.state} ({record.error.code})",
            accepted="a LoRA that is ready",
        )
    return LoraNotReady(
        f"The LoRA {record.lora_id} is not ready yet.",
        field=LORAS_FIELD,
        received=str(record.state),
        accepted=f"a LoRA that is ready; GET /v1/loras/{record.lora_id} tells",
    )


@dataclass(frozen=True)
class Loras:
    """The LoRA store as tenants see it: their own LoRAs, and those that are shared with all."""

    config: GatewayConfig
    bus: Bus
    records: LoraRecords
    _sorted: dict[str, tuple[int, Sequence[LoraRecord]]] = field(default_factory=dict)
    """The latest lists by tenant, each with what the mirror had seen when it was sorted."""

    @cached_property
    def mirror(self) -> BucketMirror[LoraRecord]:
        """Every LoRA, for lists and counts."""
        return BucketMirror(self.records.bucket)

    async def check_room(self, tenant: str) -> None:
        """Raise LoraLimit where the tenant has no room for another LoRA; uploads at once may exceed it."""
        await self.mirror.refresh()
        own, most = self.mirror.of(owner_of(tenant)), self.config.max_loras
        if len(own) >= most:
            raise LoraLimit(received=f"{len(own) + 1} LoRAs", accepted=f"at most {most}; delete one")

    async def get(self, tenant: str, lora_id: str) -> LoraRecord:
        """A LoRA that the tenant may use; LoraNotFound, too, where it is another tenant's."""
        try:
            return await self.records.get(tenant, lora_id)
        except LoraNotFound:
            return await self.records.get(EVERYONE, lora_id)

    async def used(self, tenant: str, asked: GenerationParameters, card: ModelCard) -> tuple[LoraUse, ...]:
        """The LoRAs that a tenant's request names, as a job of the model `card` keeps them.

        Raises:
            LoraNotFound, LoraNotReady, LoraMismatch: names the field, and what is accepted.
        """
        try:
            records = await asyncio.gather(*(self.get(tenant, one.id) for one in asked.loras))
        except LoraNotFound as error:
            raise LoraNotFound(
                field=LORAS_FIELD, received=error.received, accepted="an id that GET /v1/loras tells"
            ) from error
        found = zip(asked.loras, records, strict=True)
        return tuple(use_of(one, record, card, asked.lora_wait, asked.lora_join) for one, record in found)

    async def settled(self, tenant: str, lora_id: str, deadline: Deadline) -> LoraRecord:
        """The LoRA of :meth:`get` once it is ready or has failed, or as it is at the deadline."""
        record = await self.get(tenant, lora_id)
        return await self.records.until(record.tenant, lora_id, lambda now: now.state.settled, deadline)

    async def of(self, tenant: str) -> Sequence[LoraRecord]:
        """The LoRAs that a tenant may use, and its uploads, the newest first."""
        await self.mirror.refresh()
        seen, records = self._sorted.get(tenant, (None, ()))
        if seen != self.mirror.seen:
            own, shared = self.mirror.of(owner_of(tenant)), self.mirror.of(owner_of(EVERYONE))
            usable = [*own, *(record for record in shared if record.state is LoraState.READY)]
            records = sorted(usable, key=attrgetter("created_s", "lora_id"), reverse=True)
            if len(self._sorted) >= SORTED:
                self._sorted.clear()
            self._sorted[tenant] = self.mirror.seen, records
        return records

    async def pin(self, tenant: str, lora_id: str, *, pinned: bool) -> LoraRecord:
        """Have every host keep a tenant's own LoRA, or no longer.

        Raises:
            LoraNotFound: the tenant has none of this id.
            LoraLimit: the tenant has as many pinned ones as it may have.
            LoraNotReady, LoraPinsFull: the LoRA store refuses it.
        """
        await self._check_own(tenant, lora_id)
        if pinned:
            await self.mirror.refresh()
            others = sum(one.pinned and one.lora_id != lora_id for one in self.mirror.of(owner_of(tenant)))
            most = self.config.max_pinned_loras
            if others >= most:
                raise LoraLimit(received=f"{others + 1} pinned LoRAs", accepted=f"at most {most}; unpin one")
        request = PinLora(lora_id=lora_id, tenant=tenant, pinned=pinned, remaining_ms=ANSWER_MS)
        return await self.bus.call(subjects.lora("pin"), request, LoraRecord, Deadline.after_ms(ANSWER_MS))

    async def delete(self, tenant: str, lora_id: str) -> None:
        """Forget a tenant's own LoRA or upload; edits that have begun end as before."""
        await self._check_own(tenant, lora_id)
        request = RemoveLora(lora_id=lora_id, tenant=tenant, remaining_ms=ANSWER_MS)
        await self.bus.call(subjects.lora("remove"), request, LoraRecord, Deadline.after_ms(ANSWER_MS))

    async def _check_own(self, tenant: str, lora_id: str) -> None:
        """Raise LoraNotFound where the tenant has none of this id; it says so where everyone may use it."""
        try:
            await self.records.get(tenant, lora_id)
        except LoraNotFound as error:
            with suppress(LoraNotFound):
                await self.records.get(EVERYONE, lora_id)
                error.accepted = "a LoRA of your own; this one is everyone's"
            raise


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
            attempts = retry_soon(ServiceUnavailable, self.config.submit_window_s)
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
        return [record for record in await self.records.all_of(tenant) if record.expires_s > now_s]

    async def delete(self, tenant: str, template_id: str) -> None:
        """Forget the template that :meth:`get` finds, and its recording; edits that have begun end as before."""
        record = await self.get(tenant, template_id)
        await self.records.delete(record)
        await self.blobs.renew(record.image, self._edit_s)
        if record.template_key is not None:
            message = RemoveTemplate(tenant=tenant, template_key=record.template_key)
            await self.bus.publish(subjects.TEMPLATE_REMOVED, message)
        log.info("template_deleted", template=template_id, tenant=tenant)

    async def applied(
        self, tenant: str, template_id: str, asked: EditParameters
    ) -> tuple[BlobRef, EditParameters]:
        """The picture of a tenant's template, and the parameters of an edit of it; the template is renewed.

        Raises:
            TemplateNotFound: as :meth:`get`, or its picture is gone.
            TemplateMismatch: another model or size is asked for, or a part of the picture.
        """
        record = await self.get(tenant, template_id)
        parameters = templates.applied(record, asked)
        if not await self.blobs.renew(record.image, self._picture_s):
            raise TemplateNotFound(
                "The template's picture is no longer in the blob store.",
                received=template_id,
                accepted="register it again",
            )
        life_s = self.config.template_ttl_s
        await self.records.change(
            tenant, template_id, lambda known: templates.renewed(known, time.time(), life_s)
        )
        return record.image, parameters

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
