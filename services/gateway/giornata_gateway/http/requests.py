"""What an HTTP request says: its query, its headers, and the edit or the generation that it asks for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

from aiohttp import web

from giornata.deadlines import Deadline
from giornata.wire.adapters import CONTROL_IMAGES
from giornata.wire.errors import BadRequest, InvalidField
from giornata.wire.jobs import Priority
from giornata.wire.references import REFERENCE, check_count
from giornata.wire.requests import asked
from giornata_gateway.gateway import AdmittedJob
from giornata_gateway.http.body import JSON
from giornata_gateway.http.errors import GATEWAY, TENANT
from giornata_gateway.http.ignored import ignore
from giornata_gateway.http.proxies import PublicOrigin, public_origin
from giornata_gateway.http.remote_pictures import check_sources, read_sources
from giornata_gateway.http.uploads import PICTURES, read_json, read_upload
from giornata_gateway.intake.limits import ByteReservation
from giornata_gateway.intake.rules.controls import in_order
from giornata_gateway.intake.rules.forms import (
    EditFields,
    EditForm,
    F,
    Form,
    GenerationFields,
    GenerationJobForm,
    JobForm,
    RequestBody,
    WrittenPictures,
    check_source,
    read_form,
)
from giornata_gateway.intake.rules.idempotency import HEADER, read_key
from giornata_gateway.intake.rules.written import decoded, picture
from giornata_gateway.jobs.preparation import EditOrder

MAX_PAGE: Final = 100
DEFAULT_PAGE: Final = 20
WRITTEN_PICTURES: Final = PICTURES | WrittenPictures.model_fields.keys()
LAST_SEQUENCE: Final = 10**18 - 1
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


async def receive(request: web.Request, kind: type[F], held: ExitStack) -> tuple[F, AdmittedJob]:
    """The form of a request, and what it asks for, admitted; on return the pictures are stored and not in memory.

    A repetition whose pictures are fetched counts as the tenant's: what they are tells that it is one.

    `held` keeps the job's places until it is closed.
    """
    gateway, tenant = request.app[GATEWAY], request[TENANT]
    key = read_key(request.headers.getall(HEADER, ()), HEADER)
    gateway.places.check(tenant)
    if key is None:  # a repetition may be answered for nothing, which only its body tells
        gateway.quotas.check(tenant)
    with gateway.uploads.growing(tenant) as grow:
        form, upload = await _read(request, kind, grow)
        order, stay = _order(request, form, upload), None
        ignore(request, form.ignored)
        if upload.sources:
            if check_sources(
                gateway.config, upload.sources
            ):  # fetched for no more than the tenant may ask for
                order = await order.identified(key)
                stay = gateway.stay_of(order, held, always=True)
            pictures = await read_sources(gateway.config, grow, upload.sources)
            mask = pictures.pop(0) if upload.sources[0][0] == "mask" else None
            image = pictures.pop(0) if pictures else None
            order = replace(order, image=image, mask=mask, references=(*pictures, *order.references))
        return form, await gateway.admit(order, key, held, stay)


async def _read(request: web.Request, kind: type[F], grow: ByteReservation) -> tuple[F, RequestBody]:
    """The form of a request, and its pictures; a generation is JSON, its references and control images too."""
    accept = request.headers.get("Accept", "")
    if kind is EditForm and request.content_type == JSON:
        return await _read_written(request, kind, grow, accept)
    if issubclass(kind, GenerationFields):
        fields = await read_json(request, grow)
        references, controls = fields.pop(REFERENCE, []), _taken(fields, CONTROL_IMAGES)
        pictures = await asyncio.to_thread(_pictures, references, controls)
        return read_form(kind, fields.items(), accept), RequestBody((), None, None, *pictures)
    upload = await read_upload(request, grow)
    if not any(name == "template_id" for name, _ in upload.fields):
        check_source(upload.image, None)
    form = read_form(kind, upload.fields, accept)
    check_source(upload.image, form.template_id)
    return form, upload


async def _read_written(
    request: web.Request, kind: type[F], grow: ByteReservation, accept: str
) -> tuple[F, RequestBody]:
    """The form of an edit in JSON, and its pictures, some of which are still where it says."""
    fields = await read_json(request, grow, WRITTEN_PICTURES)
    given = asked(WrittenPictures, _taken(fields, WrittenPictures.model_fields))
    references, controls = fields.pop(REFERENCE, []), _taken(fields, CONTROL_IMAGES)
    form = read_form(kind, fields.items(), accept)
    more, controlled = await asyncio.to_thread(_pictures, references, controls)
    check_source(given.images or None, form.template_id if isinstance(form, EditFields) else None)
    check_count(len(given.images[1:]) + len(more))
    sources = [("mask", given.mask)] if given.mask else []
    sources += [("images", source) for source in given.images]
    return form, RequestBody((), None, None, more, controlled, tuple(sources))


def _taken(fields: dict[str, object], names: Iterable[str]) -> dict[str, object]:
    """Take the fields of these names out of `fields`."""
    return {name: fields.pop(name) for name in names if name in fields}


def _pictures(
    references: object, controls: Mapping[str, object]
) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """References and control images of a JSON body."""
    return decoded(references), in_order({name: picture(text, name) for name, text in controls.items()})


def _order(request: web.Request, form: Form, upload: RequestBody) -> EditOrder:
    config, job = (
        request.app[GATEWAY].config,
        form if isinstance(form, (JobForm, GenerationJobForm)) else None,
    )
    return EditOrder(
        parameters=form.parameters(),
        image=upload.image,
        mask=upload.mask,
        references=upload.references,
        control_images=upload.control_images,
        tenant=request[TENANT],
        priority=job.priority if job else Priority.INTERACTIVE,
        deadline=Deadline.after_ms((config.job_budget_s if job else config.budget_s) * 1000),
        task=form.task,
        template_id=form.template_id if isinstance(form, EditFields) else None,
        traceparent=trace_of(request),
    )


def trace_of(request: web.Request) -> str | None:
    """The ``traceparent`` header of W3C's Trace Context; None where it is none."""
    traceparent = request.headers.get("traceparent", "")
    return traceparent if _TRACEPARENT.fullmatch(traceparent) else None


def base_url(request: web.Request) -> str:
    """How the client reaches this gateway; empty, so that links are relative, where its Host header is no host."""
    configured = request.app[GATEWAY].config.public_url
    if configured:
        return configured
    scheme, prefix = _forwarded(request)
    try:
        origin = request.url.origin()
    except ValueError:
        return prefix
    return f"{origin.with_scheme(scheme or origin.scheme)}{prefix}"


def base_path(request: web.Request) -> str:
    """What stands before a path of this gateway in a link that stays at the same host: its address where one is set."""
    return request.app[GATEWAY].config.public_url or _forwarded(request).prefix


def _forwarded(request: web.Request) -> PublicOrigin:
    return public_origin(request, request.app[GATEWAY].config.trusted_proxies)


def number_of(values: Mapping[str, str], name: str, default: int, most: int, least: int = 0) -> int:
    """A whole number of a query or of headers; InvalidField where it is none, or beyond the limits."""
    text = values.get(name, str(default))
    digits = max(9, len(str(most)))  # Python reads no more than a few thousand
    if len(text) > digits or not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        raise InvalidField(
            "The number is not accepted.", field=name, received=text, accepted=f"{least} to {most}"
        )
    return int(text)


def page_of(query: Mapping[str, str]) -> tuple[int, str | None]:
    """How many entries a list's query asks for, and the id after which; it raises as the functions that it calls."""
    check_query(query, "limit", "after")
    return number_of(query, "limit", DEFAULT_PAGE, MAX_PAGE, least=1), query.get("after")


def last_event_id(headers: Mapping[str, str]) -> int:
    """Sequence number in the ``Last-Event-ID`` header; 0 without one. It raises as :func:`number_of`."""
    return number_of(headers, "Last-Event-ID", 0, LAST_SEQUENCE) if headers.get("Last-Event-ID") else 0


def check_query(query: Iterable[str], *accepted: str) -> None:
    """BadRequest where a query names something else than is accepted."""
    unknown = set(query) - set(accepted)
    if unknown:
        raise BadRequest(
            "Unknown query parameter.", received=", ".join(sorted(unknown)), accepted=", ".join(accepted)
        )
