"""LoRAs, masks, templates and webhooks as clients are told of them. Pure."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Generic, Literal, TypeVar

from giornata.wire.errors import InvalidField
from giornata.wire.jobs import BlobRef, Box, JobRecord, JobState
from giornata.wire.loras import EVERYONE, LoraRecord, LoraState, LoraStyle
from giornata.wire.messages import MaskedRegion, MaskMessageReply, MaskReply
from giornata.wire.templates import TemplateRecord, TemplateState, WebhookRecord, WebhookState
from giornata_gateway.views.jobs import ErrorDetail, JobView, View, error_detail, job_view

T = TypeVar("T", bound=View)
R = TypeVar("R")
L = TypeVar("L", bound="ListPage[Any]")


class ListPage(View, Generic[T]):
    """A page of a list."""

    object: Literal["list"] = "list"
    data: list[T]
    """The newest first."""
    has_more: bool
    """Whether a request with the last id as `after` tells more."""


class DeletedResource(View):
    """The answer about what was deleted."""

    id: str
    object: str
    deleted: Literal[True] = True


def page(
    kind: type[L],
    view: Callable[[R], View],
    records: Sequence[R],
    name: str,
    *,
    limit: int,
    after: str | None,
) -> L:
    """At most `limit` of the sorted `records`, from the one that follows that whose `name` is `after`.

    InvalidField where none has this name.
    """
    first = 0
    if after is not None:
        first = next((place for place, one in enumerate(records, 1) if getattr(one, name) == after), 0)
    if after is not None and not first:
        raise InvalidField(
            "There is nothing with this id to go on after.",
            field="after",
            received=after,
            accepted="an id of the list",
        )
    data = [view(record) for record in records[first : first + limit]]
    return kind(data=data, has_more=first + limit < len(records))


class LoraView(View):
    """Answer of ``POST /v1/loras`` and ``GET /v1/loras/{id}``."""

    id: str
    """The same for the same file and model; that of an upload until the file is whole."""
    object: Literal["lora"] = "lora"
    state: LoraState
    model: str | None
    """Null while it is uploaded."""
    name: str | None
    shared: bool
    """Whether it belongs to all tenants; such a LoRA is not deleted here."""
    style: LoraStyle | None
    """Whose names the tensors of the file have."""
    rank: int | None
    """The largest of any module."""
    modules: int | None
    """Modules of the denoising network that it changes; null until it is ready."""
    text_modules: int | None
    """Modules of text encoders that it changes."""
    joins_within: float | None
    """Share of the steps that a row with `lora_wait=bounded` may make without it, as pictures have shown; 0: none. Null
    until it is profiled: rows wait for it."""
    pinned: bool
    """Whether every host keeps it."""
    bytes: int
    """Size of the file; of an upload, what has come."""
    sha256: str | None
    """sha-256 of the file."""
    created_at: int
    """Unix time in seconds."""
    error: ErrorDetail | None = None
    """Why it cannot be used."""


class LoraList(ListPage[LoraView]):
    """Answer of ``GET /v1/loras``."""


class LoraDeleted(DeletedResource):
    """Answer of ``DELETE /v1/loras/{id}``."""

    object: Literal["lora"] = "lora"


def lora_view(record: LoraRecord) -> LoraView:
    """A LoRA as it is told."""
    source, canonical = record.source, record.canonical
    told = {
        "id": record.lora_id,
        "shared": record.tenant == EVERYONE,
        "modules": canonical and canonical.modules,
        "text_modules": canonical and canonical.text_modules,
        "bytes": source.size_bytes if source else record.received_bytes,
        "sha256": source and source.sha256,
        "created_at": record.created_s,
        "error": record.error and error_detail(record.error),
    }
    return LoraView.model_validate(vars(record) | told)


class RegionView(View):
    """One thing in the picture."""

    score: float
    """How sure the mask model is, in 0 to 1."""
    box: Box
    """The smallest that holds it: left, top, width and height in pixels."""
    area: int
    """Its pixels."""
    b64_png: str
    """Its mask: PNG of the picture's size, white on black."""


class MaskAnswer(View):
    """Answer of ``POST /v1/masks``."""

    created: int
    model: str
    """What made the masks."""
    width: int
    """The picture's, in pixels, once it is upright."""
    height: int
    threshold: float
    """The least score that a region had to have."""
    regions: list[RegionView]
    """The surest first."""
    b64_png: str
    """The mask of all regions together, as an edit takes it."""


def mask_answer(reply: MaskReply, pngs: Mapping[str, bytes], created: int) -> MaskAnswer:
    """The answer; `pngs` are the masks by the keys of their blobs."""

    def text(key: str) -> str:
        return base64.b64encode(pngs[key]).decode()

    regions = [
        RegionView(score=one.score, box=one.box, area=one.area, b64_png=text(one.mask.key))
        for one in reply.regions
        if one.mask is not None
    ]
    told = {"created": created, "regions": regions, "b64_png": text(reply.mask.key)}
    return MaskAnswer.model_validate(vars(reply) | told)


def mask_made(reply: MaskReply, pngs: Mapping[str, bytes]) -> MaskMessageReply:
    """The answer over NATS; `pngs` are the masks that travel inside it, by the keys of their blobs."""

    def travelling(ref: BlobRef) -> dict[str, Any]:
        return {"data": pngs.get(ref.key), "ref": None if ref.key in pngs else ref}

    regions = tuple(
        MaskedRegion(score=one.score, box=one.box, area=one.area, **travelling(one.mask))
        for one in reply.regions
        if one.mask is not None
    )
    told = vars(reply) | {"regions": regions} | travelling(reply.mask)
    return MaskMessageReply.model_validate({name: told[name] for name in MaskMessageReply.model_fields})


class TemplateView(View):
    """Answer of ``POST /v1/templates`` and ``GET /v1/templates/{id}``."""

    id: str
    object: Literal["template"] = "template"
    state: TemplateState
    model: str
    model_digest: str
    size: str
    """Output size of its edits: `auto`, the size of the picture, or WIDTHxHEIGHT."""
    width: int | None
    """Width of the upright picture in pixels; null until it was inspected."""
    height: int | None
    bytes: int
    """Size of the recording; 0 until there is one."""
    worker: str | None
    """The denoiser that records it, or recorded it last. Others record it at its first edit there."""
    created_at: int
    """Unix time in seconds."""
    expires_at: int
    """Unix time in seconds; each use puts it off."""
    error: ErrorDetail | None = None
    """Why it could not be recorded."""


class TemplateList(ListPage[TemplateView]):
    """Answer of ``GET /v1/templates``."""


class TemplateDeleted(DeletedResource):
    """Answer of ``DELETE /v1/templates/{id}``."""

    object: Literal["template"] = "template"


def template_view(record: TemplateRecord) -> TemplateView:
    """A template as it is told."""
    told = {
        "id": record.template_id,
        "bytes": record.size_bytes,
        "created_at": record.created_s,
        "expires_at": record.expires_s,
        "error": record.error and error_detail(record.error),
    }
    return TemplateView.model_validate(vars(record) | told)


class WebhookMessage(View):
    """The body of a webhook (Standard Webhooks)."""

    type: Literal["job.completed", "job.failed", "job.cancelled"]
    timestamp: datetime
    """When the gateway learnt of the job's end; that of an attempt is in its headers."""
    data: JobView
    """As `GET /v1/jobs/{id}` tells it."""


class WebhookView(View):
    """A webhook that was not taken yet."""

    id: str
    """Its job's."""
    object: Literal["webhook"] = "webhook"
    state: WebhookState
    url: str
    attempts: int
    """How often it was sent."""
    next_at: int | None
    """Unix time in seconds of the next attempt; null until the job has ended, and of one that was given up."""
    created_at: int
    """Unix time in seconds."""
    error: str | None = None
    """Why the last attempt failed."""


class WebhookList(ListPage[WebhookView]):
    """Answer of ``GET /v1/webhooks``."""


class WebhookDeleted(DeletedResource):
    """Answer of ``DELETE /v1/webhooks/{id}``."""

    object: Literal["webhook"] = "webhook"


class WebhookSecret(View):
    """Answer of ``GET /v1/webhook-secret``."""

    object: Literal["webhook_secret"] = "webhook_secret"
    secret: str
    """For libraries of Standard Webhooks: `whsec_` and base64."""


def webhook_body(record: JobRecord, base_url: str) -> str:
    """Return what a receiver is told of a job that has ended."""
    ends = {JobState.COMPLETED: "completed", JobState.FAILED: "failed", JobState.CANCELLED: "cancelled"}
    message = {
        "type": f"job.{ends[record.state]}",
        "timestamp": datetime.now(UTC),
        "data": job_view(record, base_url),
    }
    return WebhookMessage.model_validate(message).model_dump_json()


def webhook_view(hook: WebhookRecord) -> WebhookView:
    """A webhook as it is told."""
    waits = hook.state is WebhookState.WAITING and hook.body is not None
    told = {"id": hook.job_id, "created_at": hook.created_s, "next_at": int(hook.next_s) if waits else None}
    return WebhookView.model_validate(vars(hook) | told)
