"""The reading of an HTTP request: its origin, its trace, its headers, and the edit or generation that it asks for."""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import aiohttp
from aiohttp import hdrs, web

from giornata.deadlines import Deadline
from giornata.tracing import TraceSpanKind, span
from giornata.wire.adapters import CONTROL_IMAGES
from giornata.wire.errors import BadRequest, InvalidField
from giornata.wire.jobs import Priority
from giornata.wire.models import Task
from giornata.wire.requests import REFERENCE, EditParameters, asked, check_count
from giornata_gateway.admission import ByteReservation
from giornata_gateway.config import GatewayConfig
from giornata_gateway.http.responses import GATEWAY, JOB_ID, JSON, OUTCOME, TENANT, Handler, ignore
from giornata_gateway.http.uploads import PICTURES, read_json, read_upload, too_large
from giornata_gateway.jobs.preparation import HEADER, EditOrder, read_key
from giornata_gateway.jobs.submission import AdmittedJob
from giornata_gateway.rules.adapters import in_order
from giornata_gateway.rules.forms import (
    EditFields,
    EditForm,
    F,
    Form,
    GenerationFields,
    GenerationJobForm,
    JobForm,
    NamedSource,
    PictureSource,
    RequestBody,
    WrittenPictures,
    check_filled,
    check_source,
    decoded,
    picture,
    read_form,
)
from giornata_gateway.rules.tenants import check_url, hosts_in, names_of, networks_in
from giornata_gateway.webhooks import guarded_session, told


@web.middleware
async def traced(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer within a span. A request that only asks how the gateway is, or looks at a job, begins no trace."""
    resource = request.match_info.route.resource
    route = "unknown" if resource is None else resource.canonical  # ids do not become names
    begins = request.method == hdrs.METH_POST and route.startswith("/v1/")
    with span(
        f"{request.method} {route}",
        TraceSpanKind.ANSWERS,
        root=begins,
        parent=request.headers,
        method=request.method,
        route=route,
    ) as answering:
        response = await handler(request)
        answering.note(status=response.status)
        if JOB_ID in request:
            answering.note(job=request[JOB_ID])
        if response.status >= 500 or OUTCOME in request:
            answering.fail(request.get(OUTCOME, str(response.status)))
        return response


_PROTO: Final = re.compile(r'(?:^|;)\s*proto="?(https?)"?\s*(?:;|$)', re.IGNORECASE)
"""The scheme in one element of the header ``Forwarded`` (RFC 7239)."""
_PREFIX: Final = re.compile(r"(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._~-]+)+")
_networks: Final = lru_cache(networks_in)


class PublicOrigin(NamedTuple):
    """The public scheme, host and prefix of a request, as a trusted proxy tells them."""

    scheme: str | None = None
    prefix: str = ""
    """Path below which the proxy serves this gateway: it begins with a slash and ends without one, or is empty."""


def public_origin(request: web.Request, trusted: str) -> PublicOrigin:
    """Return what the headers say where the address they come from is in one of the networks `trusted`.

    Of several values the last counts, which the nearest proxy has written.
    """
    if not _is_trusted(request.remote, trusted):
        return PublicOrigin()
    scheme, prefix = _last(request, "X-Forwarded-Proto"), _last(request, "X-Forwarded-Prefix").rstrip("/")
    if not scheme and (found := _PROTO.search(_last(request, "Forwarded"))):
        scheme = found[1]
    known = scheme.lower() in {"http", "https"}
    return PublicOrigin(scheme.lower() if known else None, prefix if _PREFIX.fullmatch(prefix) else "")


def _is_trusted(peer: str | None, trusted: str) -> bool:
    try:
        address = ipaddress.ip_address(peer or "")
    except ValueError:
        return False
    inner = getattr(address, "ipv4_mapped", None) or address
    return any(inner in network for network in _networks(trusted))


def _last(request: web.Request, name: str) -> str:
    return ",".join(request.headers.getall(name, ())).rpartition(",")[2].strip()


CHUNK_BYTES: Final = 64 << 10
FETCHED_AT_ONCE: Final = 4
"""Pictures of one request."""
FETCH_S: Final = 30.0
"""Until all pictures of a request are there, each within :data:`~giornata_gateway.webhooks.ATTEMPT_S`."""


def check_sources(config: GatewayConfig, sources: Sequence[NamedSource]) -> bool:
    """Return whether some picture has to be fetched; InvalidField where one has no URL, or one that is not allowed."""
    hosts, networks = hosts_in(config.image_hosts), networks_in(config.webhook_networks)
    accepted = ", or a URL at ".join(["image_url with a data URL", *filter(None, [", ".join(sorted(hosts))])])
    for field, source in sources:
        url, received = source.image_url or "", source.file_id or source.image_url or "no image_url"
        if source.file_id is not None:
            why = "There are no files of OpenAI's Files API here."
            raise InvalidField(why, field=field, received=received, accepted=accepted)
        if _is_data(source):
            continue
        if hosts.isdisjoint(names_of(url)):
            why = "No picture is fetched from there."
            raise InvalidField(why, field=field, received=received, accepted=accepted)
        check_url(url, networks, field, "A picture cannot be fetched from there.")
    return not all(_is_data(source) for _, source in sources)


async def read_sources(
    config: GatewayConfig, grow: ByteReservation, sources: Sequence[NamedSource]
) -> list[bytes]:
    """The files of pictures that are allowed, in their order; `grow` counts the bytes of those that are fetched.

    Raises:
        InvalidField: a picture does not come whole, or not all come in time.
        PayloadTooLarge: one is larger than a file of a form may be.
    """
    slots = asyncio.Semaphore(FETCHED_AT_ONCE)

    async def read(field: str, source: PictureSource) -> bytes:
        url = source.image_url or ""
        if _is_data(source):
            return await asyncio.to_thread(picture, url, field)
        async with slots:
            return await _fetched(config, grow, url, field)

    try:
        async with grow.receiving(), asyncio.timeout(FETCH_S), asyncio.TaskGroup() as tasks:
            reading = [tasks.create_task(read(*source)) for source in sources]
    except TimeoutError as error:
        why, received = f"The pictures could not be fetched in {FETCH_S:g} s.", f"{len(sources)} pictures"
        raise InvalidField(why, field=sources[0][0], received=received) from error
    except ExceptionGroup as group:
        raise group.exceptions[0] from group
    return [one.result() for one in reading]


async def _fetched(config: GatewayConfig, grow: ByteReservation, url: str, field: str) -> bytes:
    networks, data = networks_in(config.webhook_networks), bytearray()
    try:
        async with (
            guarded_session(networks, plain=urlsplit(url).scheme == "http") as http,
            http.get(url, allow_redirects=False) as answer,
        ):
            if answer.status != 200:
                raise _not_fetched(f"status {answer.status}", url, field)
            async for chunk in answer.content.iter_chunked(CHUNK_BYTES):
                if len(data) + len(chunk) > config.max_file_bytes:
                    raise too_large(f"The picture at {url}", config.max_file_bytes, field)
                grow(len(chunk))
                data += chunk
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise _not_fetched(told(error), url, field) from error
    check_filled(data, field)
    return bytes(data)


def _is_data(source: PictureSource) -> bool:
    return (source.image_url or "").startswith("data:")


def _not_fetched(why: str, url: str, field: str) -> InvalidField:
    return InvalidField(f"A picture could not be fetched: {why}.", field=field, received=url)


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
    # a repetition may be answered for nothing, which only its body tells
    with gateway.receiving(tenant, counted=key is None) as grow:
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
    order = order_in(request, form.parameters(), form.task, upload)
    if isinstance(form, EditFields):
        order = replace(order, template_id=form.template_id)
    if not isinstance(form, (JobForm, GenerationJobForm)):
        return order
    budget_s = request.app[GATEWAY].config.job_budget_s
    return replace(order, priority=form.priority, deadline=Deadline.after_ms(budget_s * 1000))


def order_in(request: web.Request, parameters: EditParameters, task: Task, upload: RequestBody) -> EditOrder:
    """What a request asks for whose client waits for the answer."""
    return EditOrder(
        parameters=parameters,
        image=upload.image,
        mask=upload.mask,
        references=upload.references,
        control_images=upload.control_images,
        tenant=request[TENANT],
        priority=Priority.INTERACTIVE,
        deadline=Deadline.after_ms(request.app[GATEWAY].config.budget_s * 1000),
        task=task,
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
