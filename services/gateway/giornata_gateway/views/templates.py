"""Templates as ``/v1/templates`` takes and tells them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from giornata.wire.errors import BadRequest, InvalidField
from giornata.wire.requests import EditParameters, ModelName, OutputSize, request_error
from giornata.wire.templates import TemplateRecord, TemplateState
from giornata_gateway.intake.rules.forms import Upload, once_each
from giornata_gateway.views.answers import ErrorDetail, View, error_detail

MAX_WAIT_MS: Final = 60_000
MAX_PAGE: Final = 100
DEFAULT_PAGE: Final = 20
MAX_DIGITS: Final = 9
"""Of a number in a query; Python reads no more than a few thousand."""


class TemplateForm(BaseModel):
    """Fields of ``POST /v1/templates``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelName | None = Field(None, description=EditParameters.model_fields["model"].description)
    size: OutputSize = Field("auto", description=EditParameters.model_fields["size"].description)


class TemplateView(View):
    """Answer of ``POST /v1/templates`` and ``GET /v1/templates/{id}``."""

    id: str
    object: Literal["template"] = "template"
    state: TemplateState
    model: str
    model_digest: str
    size: str
    """Output size of its edits: `auto`, that of the picture, or WIDTHxHEIGHT."""
    width: int | None
    """Of the picture, upright, in pixels; null until it was looked at."""
    height: int | None
    bytes: int
    """What was recorded; 0 until then."""
    worker: str | None
    """The denoiser that records it, or recorded it last; others do at its first edit there."""
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
    """Whether `after` with the last id tells more."""


class TemplateDeleted(View):
    """Answer of ``DELETE /v1/templates/{id}``."""

    id: str
    object: Literal["template"] = "template"
    deleted: Literal[True] = True


def read_template_form(upload: Upload) -> TemplateForm:
    """The form of a registration.

    Raises:
        InvalidField, UnknownField: names the field at fault.
    """
    if upload.mask is not None:
        raise InvalidField(
            "A template is a whole picture; masks come with its edits.",
            field="mask",
            received="a file",
            accepted="files: image",
        )
    try:
        return TemplateForm.model_validate(once_each(upload.fields))
    except ValidationError as error:
        raise request_error(error) from error


def template_view(record: TemplateRecord) -> TemplateView:
    """A template as it is told."""
    return TemplateView(
        id=record.template_id,
        state=record.state,
        model=record.model,
        model_digest=record.model_digest,
        size=record.size,
        width=record.width,
        height=record.height,
        bytes=record.size_bytes,
        worker=record.worker,
        created_at=record.created_s,
        expires_at=record.expires_s,
        error=None if record.error is None else error_detail(record.error),
    )


def template_list(records: Sequence[TemplateRecord], limit: int, after: str | None) -> TemplateList:
    """A page of `records`, which are sorted; those that follow the one named `after`.

    Raises:
        InvalidField: none is named so.
    """
    names = [record.template_id for record in records]
    if after is not None and after not in names:
        raise InvalidField(
            "There is no such template to go on after.",
            field="after",
            received=after,
            accepted="the id of a template",
        )
    first = 0 if after is None else names.index(after) + 1
    page = records[first : first + limit]
    return TemplateList(
        data=[template_view(record) for record in page], has_more=first + limit < len(records)
    )


def query_number(query: Mapping[str, str], name: str, default: int, most: int, least: int = 0) -> int:
    """A whole number of a query.

    Raises:
        InvalidField: it is none, or beyond the limits.
    """
    text = query.get(name, str(default))
    if len(text) > MAX_DIGITS or not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        raise InvalidField(
            "The number is not accepted.", field=name, received=text, accepted=f"{least} to {most}"
        )
    return int(text)


def check_query(query: Iterable[str], *accepted: str) -> None:
    """BadRequest where a query names something else than is accepted."""
    unknown = set(query) - set(accepted)
    if unknown:
        raise BadRequest(
            "Unknown query parameter.",
            received=", ".join(sorted(unknown)),
            accepted=", ".join(accepted) or "none",
        )
