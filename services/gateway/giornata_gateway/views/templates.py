"""Templates as ``/v1/templates`` tells them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from giornata.wire.templates import TemplateRecord, TemplateState
from giornata_gateway.views.answers import ErrorDetail, View, error_detail
from giornata_gateway.views.pages import page_of


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


class TemplateList(View):
    """Answer of ``GET /v1/templates``."""

    object: Literal["list"] = "list"
    data: list[TemplateView]
    """The newest first."""
    has_more: bool
    """Whether a request with the last id as `after` tells more."""


class TemplateDeleted(View):
    """Answer of ``DELETE /v1/templates/{id}``."""

    id: str
    object: Literal["template"] = "template"
    deleted: Literal[True] = True


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


def template_list(records: Sequence[TemplateRecord], limit: int, after: str | None) -> TemplateList:
    """A page of the sorted `records`, from the one that follows the template `after`; InvalidField without it."""
    page, has_more = page_of(records, lambda record: record.template_id, limit, after)
    return TemplateList(data=[template_view(record) for record in page], has_more=has_more)
