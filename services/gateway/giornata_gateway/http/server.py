"""The HTTP door: an aiohttp application with its pages, listening, and its end in order."""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Final, NamedTuple

import structlog
from aiohttp import hdrs, web

from giornata import tracing as spans
from giornata.wire.errors import GiornataError, ServiceUnavailable, Unauthorized
from giornata_gateway.gateway import Gateway
from giornata_gateway.http import resources
from giornata_gateway.http.a1111 import A1111_ROUTES, AWAITED_JOBS, AwaitedJobs
from giornata_gateway.http.connections import ConnectionLimits, LimitedRunner
from giornata_gateway.http.requests import traced
from giornata_gateway.http.responses import (
    GATEWAY,
    IGNORED,
    REPEATED,
    SERVER,
    TENANT,
    Handler,
    errors_as_json,
    header_value,
)
from giornata_gateway.http.responses import HEADER as IGNORED_HEADER
from giornata_gateway.http.routes import ROUTE, ROUTES, document
from giornata_gateway.jobs.preparation import REPEATED as REPEATED_HEADER
from giornata_gateway.rules import tenants

CONTENT_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".jpg": "image/jpeg",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".md": "text/markdown; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".webp": "image/webp",
}
"""Content types by suffix; a file with another suffix is not served."""

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""Nothing comes from elsewhere, nothing is inline, and no text becomes markup."""


class Asset(NamedTuple):
    """One file as it is answered."""

    body: bytes
    content_type: str
    etag: str


ASSETS: Final = web.AppKey("assets", Mapping[str, Asset])


def load_assets() -> Mapping[str, Asset]:
    """Every file of ``static/`` by its path there."""
    static = Path(str(files("giornata_gateway"))) / "static"
    served = (path for path in static.rglob("*") if path.suffix in CONTENT_TYPES)
    return {path.relative_to(static).as_posix(): _asset(path) for path in served}


async def studio(request: web.Request) -> web.Response:
    """``GET /``: the page on which a person edits."""
    return _answer(request, "index.html")


async def docs(request: web.Request) -> web.Response:
    """``GET /docs``: the OpenAPI document as a page."""
    return _answer(request, "docs.html")


async def asset(request: web.Request) -> web.Response:
    """``GET /studio/{path}``: what the two pages are made of."""
    return _answer(request, request.match_info["path"])


PAGES: Final = (web.get("/", studio), web.get("/docs", docs), web.get("/studio/{path:.+}", asset))


def _answer(request: web.Request, path: str) -> web.Response:
    found = request.app[ASSETS].get(path)
    if found is None:
        raise web.HTTPNotFound
    headers = {
        "ETag": f'"{found.etag}"',
        "Cache-Control": "no-cache",
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
    }
    if any(tag.value in {found.etag, "*"} for tag in request.if_none_match or ()):
        return web.Response(status=304, headers=headers)
    return web.Response(body=found.body, headers=headers | {"Content-Type": found.content_type})


def _asset(path: Path) -> Asset:
    body = path.read_bytes()
    return Asset(body, CONTENT_TYPES[path.suffix], hashlib.sha256(body).hexdigest()[:32])


log = structlog.get_logger(__name__)

BEARER_OR_BASIC: Final = 'Bearer, Basic realm="Giornata", charset="UTF-8"'
REQUEST_ID_HEADER: Final = "X-Request-Id"
REQUEST_ID: Final = web.RequestKey("request_id", str)
"""The client's own where it sends one that can be told again, else a new one."""
_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
CLOSE_S: Final = 5.0
"""After the drain: how long answers that are being written may still take."""


@asynccontextmanager
async def listening(gateway: Gateway) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Listen while inside; on leaving, answer every request that has come, then close.

    Yields what stops listening and closes the connections on which no request is being answered. Raises
    ServiceUnavailable where the address cannot be listened on.
    """
    runner = LimitedRunner(
        _application(gateway),
        _limits(gateway),
        handler_cancellation=True,
        shutdown_timeout=CLOSE_S,
        access_log=None,
        auto_decompress=False,  # a small body that unpacks to a large one is refused, see requests
    )
    await runner.setup()
    try:
        site = await _site(runner, gateway)
        try:
            yield partial(_stop, gateway, runner, site)
        finally:
            left = await gateway.departure.quiet(gateway.config.drain_s + CLOSE_S)
            if left:
                log.warning("requests_left_behind", requests=left)
    finally:
        await runner.cleanup()


def _limits(gateway: Gateway) -> ConnectionLimits:
    config = gateway.config

    def refused(error: GiornataError) -> None:
        gateway.metrics.answered("http", "unknown", error.status, error.code, 0.0)

    pools = gateway.pools["strangers"], gateway.pools["connections"]
    return ConnectionLimits(config.head_s, config.idle_s, config.stall_s, *pools, refused)


def _application(gateway: Gateway) -> web.Application:
    tracing = [traced] if spans.is_on() else []
    app = web.Application(
        middlewares=[_counted, _preflighted, *tracing, errors_as_json],
        client_max_size=gateway.config.max_request_bytes,
    )
    app.on_response_prepare.append(_tell)
    app[GATEWAY] = gateway
    app[ASSETS] = load_assets()
    app[AWAITED_JOBS] = AwaitedJobs()
    routes = (*ROUTES, *(A1111_ROUTES if gateway.config.a1111 else ()))
    app[resources.FRAMES] = resources.FleetFrames()
    app[resources.DOCUMENT] = document(routes)
    app.add_routes([*(route.served() for route in routes), *PAGES])
    return app


@web.middleware
async def _counted(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count a request that has come: it is answered, though the gateway leaves meanwhile. Its logs have its id."""
    request_id = _request_id(request)
    if request.transport is None:
        raise ConnectionAbortedError("The client has left.")
    with (
        request.app[GATEWAY].departure.answering(request.transport),
        structlog.contextvars.bound_contextvars(request_id=request_id),
    ):
        return await handler(request)


def _request_id(request: web.Request) -> str:
    """The id of a request: given by it or by us, once. aiohttp refuses some before any middleware sees them."""
    if REQUEST_ID not in request:
        given = request.headers.get(REQUEST_ID_HEADER, "")
        request[REQUEST_ID] = given if _ID.fullmatch(given) else f"req_{secrets.token_hex(16)}"
    return request[REQUEST_ID]


@web.middleware
async def _preflighted(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer what a browser asks before a page of another origin may call."""
    origin = request.headers.get(hdrs.ORIGIN)
    asks = request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
    if asks and origin and tenants.is_allowed(origin, request.app[GATEWAY].config.cors_origins):
        asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
        return web.Response(status=204, headers=tenants.headers(origin, asked))
    return await handler(request)


async def _tell(request: web.Request, response: web.StreamResponse) -> None:
    """Before an answer's headers: what the tenant may still ask for, whether the job is repeated, whether we leave."""
    gateway, route = request.app[GATEWAY], request.get(ROUTE)
    response.headers[hdrs.SERVER] = SERVER
    response.headers[REQUEST_ID_HEADER] = _request_id(request)
    origin = request.headers.get(hdrs.ORIGIN)
    if gateway.config.cors_origins:
        response.headers[hdrs.VARY] = "Origin"  # of each answer: caches would give one origin's to all
    if origin and tenants.is_allowed(origin, gateway.config.cors_origins):
        response.headers.update(tenants.headers(origin))
    if route is not None and route.form and TENANT in request:
        response.headers.update(gateway.quotas.headers(request[TENANT]))
    if request.get(REPEATED):
        response.headers[REPEATED_HEADER] = "true"
    if request.get(IGNORED):
        response.headers[IGNORED_HEADER] = header_value(request[IGNORED])
    if route is not None and route.basic and response.status == Unauthorized.status:
        response.headers[hdrs.WWW_AUTHENTICATE] = BEARER_OR_BASIC
    if gateway.departure.announced.is_set():
        response.headers[hdrs.CONNECTION] = "close"
        response.force_close()


async def _site(runner: web.AppRunner, gateway: Gateway) -> web.TCPSite:
    config = gateway.config
    # a crowd that comes at once waits here: where the queue is full, the kernel resets who comes
    site = web.TCPSite(runner, config.host, config.port, backlog=config.max_connections)
    try:
        await site.start()
    except OSError as error:
        raise ServiceUnavailable(
            f"The address {config.host}:{config.port} cannot be listened on: {error}."
        ) from error
    port = int(runner.addresses[0][1])
    if config.port_file is not None:
        config.port_file.write_text(f"{port}\n")
    log.info("listening", url=f"http://{config.host}:{port}", port=port)
    return site


async def _stop(gateway: Gateway, runner: web.AppRunner, site: web.TCPSite) -> None:
    """Stop as aiohttp does not.

    Its own `pre_shutdown` would read no more of a request whose body is still coming, and would leave the other
    connections open without a handler.
    """
    await site.stop()
    await asyncio.sleep(0)  # as in aiohttp's own clean-up: the requests that have been read begin first
    for connection in runner.server.connections if runner.server is not None else ():
        if connection.transport not in gateway.departure.asking:
            connection.force_close()
