"""Answers of the HTTP door: errors in one form, links as clients reach it, bodies in pieces, server-sent events."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, NamedTuple
from urllib.parse import quote

import nats.errors
import structlog
from aiohttp import hdrs, web
from pydantic import BaseModel

from giornata.tracing import TraceSpanKind, span
from giornata.wire.errors import GiornataError, InternalError, ServiceUnavailable, TooManyStreams
from giornata.wire.jobs import BlobRef
from giornata_gateway.admission import Tenant
from giornata_gateway.config import networks_in
from giornata_gateway.gateway import Gateway
from giornata_gateway.views.jobs import ErrorAnswer, ErrorDetail, error_detail, error_type

log = structlog.get_logger(__name__)

HEADER: Final = "X-Giornata-Ignored"
TOLD: Final = 40
"""Most fields that the header names."""
NAME_CHARACTERS: Final = 64
IGNORED: Final[web.RequestKey[Iterable[str]]] = web.RequestKey("ignored", tuple)
"""The fields that :func:`ignore` was told of, each once, in the order of the request."""


def ignore(request: web.Request, fields: Iterable[str]) -> None:
    """Have the answer of `request` tell that these `fields` had no effect; a second call adds to the first."""
    before = request.get(IGNORED, ())
    request[IGNORED] = tuple(dict.fromkeys((*before, *fields)))
    if request[IGNORED] != before:
        log.info("fields_ignored", path=request.path, fields=header_value(request[IGNORED]))


def header_value(fields: Iterable[str]) -> str:
    """The names with commas between them, each in ASCII without a comma, whatever a client has called its fields."""
    names = list(fields)
    told = [quote(name.encode("utf-8", "replace")[:NAME_CHARACTERS], safe="[]:/ ") for name in names[:TOLD]]
    return ", ".join([*told, *([f"and {len(names) - TOLD} more"] if len(names) > TOLD else [])])


HTTP_ERRORS: Final = {
    404: ("route_not_found", "No such path."),
    405: ("method_not_allowed", "Not with this method."),
}
"""Errors of HTTP itself; :mod:`giornata.wire.errors` has all others."""

SERVER: Final = "giornata"
"""The ``Server`` header: no library, and no version of one."""
GATEWAY: Final = web.AppKey("gateway", Gateway)
JOB_ID: Final = web.RequestKey("job_id", str)
"""Set once a request is about a job, so that its errors name it."""
OUTCOME: Final = web.RequestKey("outcome", str)
"""Code of an error that was told inside an event stream, whose status is 200."""
TENANT: Final = web.RequestKey("tenant", Tenant)
"""The tenant that asks, on every route that needs a key."""
REPEATED: Final = web.RequestKey("repeated", bool)
"""Whether the request's job is that of an earlier request with the same idempotency key."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors in OpenAI's form and count every answer."""
    started = time.monotonic()
    status, code = 499, "client_closed"  # counted where the client has left, never sent
    try:
        try:
            response = await handler(request)
            code = request.get(OUTCOME, "ok")
        except web.HTTPException as error:
            code = HTTP_ERRORS.get(error.status, ("http_error", ""))[0]
            response = http_answer(error)
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception as error:  # noqa: BLE001 - the request's edge: logged and answered
            known = as_known(error, request.path)
            code = known.code
            response = error_answer(known, request.get(JOB_ID))
        status = response.status
        return response
    finally:
        if request.get(REPEATED):
            request.app[GATEWAY].metrics.repeated.labels("http").inc()
        resource = request.match_info.route.resource
        route = "unknown" if resource is None else resource.canonical  # ids do not become labels
        request.app[GATEWAY].metrics.answered("http", route, status, code, time.monotonic() - started)


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


def http_answer(error: web.HTTPException) -> web.Response:
    """An error of HTTP itself as JSON."""
    code = HTTP_ERRORS.get(error.status, ("http_error", ""))[0]
    detail = ErrorDetail(code=code, message=f"{error.reason}.", type=error_type(error.status))
    kept = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
    return json_answer(ErrorAnswer(error=detail), status=error.status, headers=kept)


def as_known(error: Exception, where: str) -> GiornataError:
    """`error` as one of the tree; what is unexpected is logged."""
    if isinstance(error, GiornataError):
        return error
    if isinstance(error, nats.errors.Error):
        log.warning("nats_failed", where=where, error=repr(error))
        return ServiceUnavailable("NATS does not answer.", retry_after_s=2)
    log.error("request_failed", where=where, exc_info=error)
    return InternalError()


def error_answer(error: GiornataError, job_id: str | None = None) -> web.Response:
    """An error as an HTTP answer; Retry-After where waiting helps."""
    response = json_answer(ErrorAnswer(error=error_detail(error.body(), job_id)), status=error.status)
    if error.status in {429, 503}:
        response.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s or 1)))
    if error.status == 408:  # the rest of the request may still come
        response.force_close()
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def json_answer(body: BaseModel, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A pydantic model as JSON."""
    named = {hdrs.SERVER: SERVER, **(headers or {})}
    return web.json_response(text=body.model_dump_json(), status=status, headers=named)


_PROTO: Final = re.compile(r'(?:^|;)\s*proto="?(https?)"?\s*(?:;|$)', re.IGNORECASE)
"""The scheme in one element of the header ``Forwarded`` (RFC 7239)."""
_PREFIX: Final = re.compile(r"(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._~-]+)+")


class PublicOrigin(NamedTuple):
    """The public scheme, host and prefix of a request, as a trusted proxy tells them."""

    scheme: str | None = None
    prefix: str = ""
    """Path below which the proxy serves this gateway: it begins with a slash and ends without one, or is empty."""


def public_origin(request: web.Request, trusted: str) -> PublicOrigin:
    """Return what the headers say where the address they come from is in one of the networks `trusted`.

    Of several values the last counts, which the nearest proxy has written.
    """
    try:
        peer = ipaddress.ip_address(request.remote or "")
    except ValueError:
        return PublicOrigin()
    inner = getattr(peer, "ipv4_mapped", None) or peer
    if not any(inner in network for network in networks_in(trusted)):
        return PublicOrigin()
    scheme, prefix = _last(request, "X-Forwarded-Proto"), _last(request, "X-Forwarded-Prefix").rstrip("/")
    if not scheme and (found := _PROTO.search(_last(request, "Forwarded"))):
        scheme = found[1]
    known = scheme.lower() in {"http", "https"}
    return PublicOrigin(scheme.lower() if known else None, prefix if _PREFIX.fullmatch(prefix) else "")


def _last(request: web.Request, name: str) -> str:
    return ",".join(request.headers.getall(name, ())).rpartition(",")[2].strip()


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


JSON: Final = "application/json"
PIECE_BYTES: Final = 1 << 20
JSON_COPIES: Final = 4
"""A picture inside an answer is held as text and as bytes, each a third larger, and for a while as the picture."""
EVENT_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""Headers of server-sent events."""
GIVEN_BACK: Final = b": another tenant needs the place of this stream\nretry: 5000\n\n"
"""The end of a stream whose place was taken back; clients connect again after `retry` milliseconds."""


def frame(event: str, data: BaseModel, sequence: int | None = None) -> bytes:
    """One server-sent event (WHATWG HTML, section 9.2); `sequence` is its id, to which ``Last-Event-ID`` refers.

    JSON has no raw line breaks, so one data line holds `data`; None fields are left out.
    """
    head = f"event: {event}\n" if sequence is None else f"id: {sequence}\nevent: {event}\n"
    return f"{head}data: {data.model_dump_json(exclude_none=True)}\n\n".encode()


async def send(
    request: web.Request, data: bytes, content_type: str, headers: Mapping[str, str]
) -> web.StreamResponse:
    """Answer with `data`; returns when the client has it, or raises ConnectionAbortedError if it does not read."""
    response = web.StreamResponse(headers=headers)
    response.content_type = content_type
    response.content_length = len(data)
    async with _taken(request):
        await response.prepare(request)
    if request.method != hdrs.METH_HEAD:
        await write(request, response, data)
    await end(request, response)
    return response


async def send_pictures(
    request: web.Request,
    refs: Sequence[BlobRef],
    headers: Mapping[str, str],
    answer: str | Callable[[Sequence[bytes]], BaseModel],
    read: Callable[[BlobRef], Awaitable[bytes]],
) -> web.StreamResponse:
    """Answer with the first picture itself, where `answer` is its type, or with the JSON that it makes of all of them.

    The answer begins once there is room for it.
    """
    if isinstance(answer, str):
        async with room(request, refs[0].size_bytes):
            return await send(request, await read(refs[0]), answer, headers)
    async with room(request, JSON_COPIES * sum(ref.size_bytes for ref in refs)):
        pictures = [await read(ref) for ref in refs]
        body = await asyncio.to_thread(lambda: answer(pictures).model_dump_json().encode())
        pictures.clear()
        return await send(request, body, JSON, headers)


async def write(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Write `data` to an answer that has begun; raises as :func:`send`, and so does :func:`end`."""
    view = memoryview(data)
    for start in range(0, len(view), PIECE_BYTES):
        async with _taken(request):
            await response.write(view[start : start + PIECE_BYTES])


async def end(request: web.Request, response: web.StreamResponse) -> None:
    """End an answer."""
    async with _taken(request):
        await response.write_eof()


def room(request: web.Request, size_bytes: int) -> AbstractAsyncContextManager[None]:
    """Room for an answer to a tenant. A slow reader is cut off where another tenant needs the room."""

    def cut() -> None:
        log.info("answer_cut", path=request.path, tenant=request[TENANT].name)
        if request.transport is not None:
            request.transport.abort()

    return request.app[GATEWAY].answers.room(request[TENANT], size_bytes, cut)


@asynccontextmanager
async def looking_on(request: web.Request, response: web.StreamResponse) -> AsyncIterator[None]:
    """Hold the place of an event stream while inside. The stream ends early where another tenant needs the place."""
    try:
        async with request.app[GATEWAY].watchers.lent(request[TENANT]):
            yield
    except TooManyStreams as error:
        if not response.prepared:
            raise
        request[OUTCOME] = error.code
        await write(request, response, GIVEN_BACK)
        await end(request, response)


@asynccontextmanager
async def _taken(request: web.Request) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(request.app[GATEWAY].config.stall_s):
            yield
    except TimeoutError as error:
        log.info("client_does_not_read", path=request.path)
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionAbortedError("The client does not read its answer.") from error
