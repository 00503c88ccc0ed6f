"""LoRAs as ``/v1/loras`` tells them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from giornata.wire.loras import EVERYONE, LoraRecord, LoraState, LoraStyle
from giornata_gateway.views.answers import ErrorDetail, View, error_detail
from giornata_gateway.views.pages import page_of


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


class LoraList(View):
    """Answer of ``GET /v1/loras``."""

    object: Literal["list"] = "list"
    data: list[LoraView]
    """The newest first."""
    has_more: bool
    """Whether a request with the last id as `after` tells more."""


class LoraDeleted(View):
    """Answer of ``DELETE /v1/loras/{id}``."""

    id: str
    object: Literal["lora"] = "lora"
    deleted: Literal[True] = True


def lora_view(record: LoraRecord) -> LoraView:
    """A LoRA as it is told."""
    source, canonical = record.source, record.canonical
    return LoraView(
        id=record.lora_id,
        state=record.state,
        model=record.model,
        name=record.name,
        shared=record.tenant == EVERYONE,
        style=record.style,
        rank=record.rank,
        modules=canonical.modules if canonical else None,
        text_modules=canonical.text_modules if canonical else None,
        joins_within=record.joins_within,
        pinned=record.pinned,
        bytes=source.size_bytes if source else record.received_bytes,
        sha256=source.sha256 if source else None,
        created_at=record.created_s,
        error=error_detail(record.error) if record.error else None,
    )


def lora_list(records: Sequence[LoraRecord], limit: int, after: str | None) -> LoraList:
    """A page of the sorted `records`, from the one that follows the LoRA `after`; InvalidField without it."""
    page, has_more = page_of(records, lambda record: record.lora_id, limit, after)
    return LoraList(data=[lora_view(record) for record in page], has_more=has_more)
