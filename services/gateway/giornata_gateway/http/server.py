"""The HTTP door: its connections and their limits, who may ask for what, an aiohttp application, its end in order.

aiohttp limits no connections: it waits for the rest of a head until its keep-alive timeout ends, and for a peer that
vanished as long as the kernel does, which is hours.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import re
import secrets
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, cast
from urllib.parse import urlsplit

import structlog
from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from giornata import tracing as spans
from giornata.shares import TenantAllocation
from giornata.wire.errors import (
    BadRequest,
    CrossSite,
    GiornataError,
    InternalError,
    InvalidField,
    RequestTimeout,
    ServiceUnavailable,
    TooManyConnections,
    Unauthorized,
)
from giornata_gateway.admission import Tenant
from giornata_gateway.config import origins_in
from giornata_gateway.gateway import Gateway
from giornata_gateway.http import resources
from giornata_gateway.http.a1111 import A1111_ROUTES, AWAITED_JOBS, AwaitedJobs
from giornata_gateway.http.responses import (
    GATEWAY,
    IGNORED,
    JOB_ID,
    REPEATED,
    SERVER,
    TENANT,
    Handler,
    error_answer,
    errors_as_json,
    header_value,
    http_answer,
    traced,
)
from giornata_gateway.http.responses import HEADER as IGNORED_HEADER
from giornata_gateway.http.routes import GET, ROUTES, Route, document
from giornata_gateway.jobs.preparation import REPEATED as REPEATED_HEADER

log = structlog.get_logger(__name__)

PROBES: Final = 4
"""How often a silent peer is asked for a sign of life within the time that it may take."""
PIECE_BYTES: Final = 16 << 10
"""Parsed at a time. Bytes that come as chunks of one take 15 µs each, and a read of 256 KiB can hold 43,000 of them."""
LOG_EVERY_S: Final = 10.0
"""Malformed requests are told in one line of the log for so long."""


class LimitedRunner(web.AppRunner):
    """An application whose connections are limited; `options` are aiohttp's."""

    def __init__(self, app: web.Application, gateway: Gateway, **options: Any) -> None:
        # after an answer that came first, the rest of a body is read for as long as a head may take
        config = gateway.config
        timing: dict[str, Any] = {"keepalive_timeout": config.idle_s, "lingering_time": config.head_s}
        super().__init__(app, **timing, **options)
        self._gateway = gateway

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(made, self._gateway, self._kwargs)


class _Server(web.Server):
    """aiohttp's server `made`, which makes connections of our kind."""

    def __init__(self, made: web.Server, gateway: Gateway, options: dict[str, Any]) -> None:
        super().__init__(made.request_handler, **{**options, "request_factory": made.request_factory})
        self.gateway = gateway
        self._malformed, self._tell_s = 0, 0.0

    def refused(self, error: GiornataError) -> None:
        """Count a connection that is closed by a limit, with the answer that it got."""
        self.gateway.metrics.answered("http", "unknown", error.status, error.code, 0.0)

    def tell_malformed(self, peer: str | None, why: str) -> None:
        """Log that a request is malformed, without its bytes, which may hold a key; at most one line in a while."""
        self._malformed += 1
        if (now_s := self._loop.time()) >= self._tell_s:
            log.warning("malformed_requests", count=self._malformed, latest=why, peer=peer)
            self._malformed, self._tell_s = 0, now_s + LOG_EVERY_S

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(web.RequestHandler):
    """A connection that is closed where its next head does not come in time."""

    __slots__ = ("_asked", "_begun", "_config", "_holding", "_pieces", "_pool", "_server", "_timer")

    def __init__(self, server: _Server, **options: Any) -> None:
        super().__init__(server, **options)
        self._server, self._config = server, server.gateway.config
        self._begun = False
        """Whether the head that is awaited has begun to come."""
        self._asked = False
        """Whether a whole request has ever come."""
        self._timer: asyncio.TimerHandle | None = None
        self._pool, self._holding = server.gateway.pools["strangers"], TenantAllocation("")
        self._pieces = deque[bytes]()
        """Bytes that are not parsed yet; the first ones are while they are being parsed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        drop_vanished(transport.get_extra_info("socket"), self._config.stall_s)
        host = str((transport.get_extra_info("peername") or ("",))[0])
        # of IPv6 its network's
        address = str(ipaddress.ip_network(f"{host}/64", strict=False)) if ":" in host else host
        self._holding = TenantAllocation(address, takeable=lambda: True, revoke=self.force_close)
        self._pool.take(self._holding, 1, time.monotonic())
        self._expect()

    def known_as(self, tenant: Tenant) -> None:
        """A request of `tenant` has come; TooManyConnections where it has as many connections as it may."""
        strangers, known = (self._server.gateway.pools[name] for name in ("strangers", "connections"))
        if self._pool is known and self._holding.tenant == tenant.name:
            self._holding.moved_s = time.monotonic()
            return
        holding = TenantAllocation(tenant.name, tenant.weight, lambda: not self._busy, self.force_close)
        if not known.take(holding, 1, time.monotonic()):
            known.outcomes[tenant.name, "refused"] += 1
            accepted = f"{strangers.capacity + known.capacity} connections, shared by the tenants that ask"
            raise TooManyConnections(accepted=accepted, retry_after_s=1)
        self._pool.give_back(self._holding)
        self._pool, self._holding = known, holding

    def data_received(self, data: bytes) -> None:
        """Parse a piece, and the next ones after what other connections have to do."""
        parsing = bool(self._pieces)
        if not parsing and len(data) <= PIECE_BYTES:
            self._parse(data)
            return
        self._pieces.extend(data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES))
        if not parsing:
            self._parse_piece()

    def _parse_piece(self) -> None:
        if self._force_close or self.transport is None:
            self._pieces.clear()
        if not self._pieces:
            return
        self._parse(self._pieces[0])
        self._pieces.popleft()
        if self._pieces:
            self._pause_reading_for_buffer()
            self._loop.call_soon(self._parse_piece)
        elif self._buffer_paused and len(self._messages) < self._max_msg_queue_size:
            self._resume_reading_for_buffer()

    def _parse(self, data: bytes) -> None:
        if self._timer is None and not self._busy:
            self._expect()
        self._begun = self._begun or bool(data)
        super().data_received(data)
        self._asked = self._asked or bool(self._messages)
        if self._busy:
            self._relax()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._relax()
        self._pool.give_back(self._holding)
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - aiohttp's signature
    ) -> web.StreamResponse:
        """The answer to a request that is no HTTP, or that failed outside of every handler.

        aiohttp's own is plain text, and is logged with the request's bytes.
        """
        if status < InternalError.status and isinstance(exc, HttpProcessingError):
            why = "a line that is too long" if isinstance(exc, LineTooLong) else "bytes that are no request"
            error: GiornataError = BadRequest(
                "The request is not well-formed.", received=why, accepted="HTTP/1.1"
            )
            self._server.tell_malformed(request.remote, why)
        else:
            error = InternalError()
            log.error("request_failed", where="connection", exc_info=exc)
        self._server.refused(error)
        if request.writer.output_size > 0:
            raise ConnectionError("An answer has begun.")
        response = error_answer(error)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Finish an answer; an error that aiohttp made outside of our middlewares becomes one of ours."""
        answered = http_answer(resp) if isinstance(resp, web.HTTPException) else resp
        return await super().finish_response(request, answered, start_time)

    @property
    def _busy(self) -> bool:
        """Return whether a request has come that is not answered and read to its end: then no head is awaited.

        Before the first one aiohttp's task may not have begun to wait for it.
        """
        return self._asked and (bool(self._messages) or self._waiter is None or self._waiter.done())

    def _expect(self) -> None:
        self._timer = self._loop.call_later(self._config.head_s, self._too_late)

    def _relax(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._begun = False

    def _too_late(self) -> None:
        """Answer outside of any request, unless none has begun, as where browsers connect ahead; and close."""
        self._timer = None
        if self._begun:
            message = "The head of the request was not received in time."
            error = RequestTimeout(message, accepted=f"{self._config.head_s:g} s")
            self._server.refused(error)
            if self.transport is not None:
                self.transport.write(whole_answer(error))
        self.force_close()


def drop_vanished(peer: socket.socket, unheard_s: float) -> None:
    """Have the kernel end a connection whose peer vanished without a word, where the system can (tcp(7)).

    What is sent must be acknowledged within `unheard_s`. A peer that is silent for so long is asked for a sign of life,
    and has as long again: a client that waits for its picture sends nothing, but its kernel answers.
    """
    whole_s = max(1, round(unheard_s))
    wanted = {
        "TCP_KEEPIDLE": whole_s,
        "TCP_KEEPINTVL": max(1, whole_s // PROBES),
        "TCP_KEEPCNT": PROBES,
        "TCP_USER_TIMEOUT": round(unheard_s * 1000),
    }
    for name, value in wanted.items():
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def whole_answer(error: GiornataError) -> bytes:
    """An error as an answer of its own that closes the connection, outside of any request."""
    told = error_answer(error)
    told.headers[hdrs.CONNECTION], told.headers[hdrs.CONTENT_LENGTH] = "close", str(told.content_length)
    lines = [f"HTTP/1.1 {told.status} {told.reason}", *map(": ".join, told.headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + bytes(cast("bytes", told.body))


# Who may ask.


SINGLE: Final = (
    "Authorization",
    "X-Api-Key",
    "Idempotency-Key",
    "Last-Event-ID",
    "Sec-Fetch-Site",
    "Content-Encoding",
)
"""Headers of which a request has one at most; aiohttp sees to Host, Content-Type and those of a body's length."""
ROUTE: Final = web.RequestKey("route", Route)
"""The API route that a request is for."""


def check_site(site: str | None, origin: str | None, own: Collection[str], *, keyed: bool) -> None:
    """Raise CrossSite for a page of another web site: any page can have its visitor's browser send a form here.

    `site` is the ``Sec-Fetch-Site`` header, which browsers set and pages cannot; over plain HTTP they send ``Origin``
    alone, which is compared with the gateway's `own` hosts. Other clients send neither. A `keyed` gateway asks for an
    API key, which the page would not know.
    """
    foreign = site is None and origin is not None and (origin.partition("://")[2] or origin) not in own
    if not keyed and (foreign or site == "cross-site"):
        raise CrossSite(
            received=f"Origin: {origin}" if foreign else f"Sec-Fetch-Site: {site}",
            accepted="requests from pages of the gateway's own site, from programs, or to a gateway with API keys",
        )


def bearer(authorization: str | None) -> str | None:
    """The token of an ``Authorization: Bearer`` header."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def password(authorization: str | None) -> str | None:
    """The password of an ``Authorization: Basic`` header (RFC 7617); the user's name may be any."""
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        _, _, word = base64.b64decode(token, validate=True).decode().partition(":")
    except ValueError:
        return None
    return word or None


EXPOSED: Final = (
    "X-Request-Id, X-Giornata-Job, X-Giornata-Ignored, Location, Retry-After, RateLimit, RateLimit-Policy"
)
"""Headers of answers that pages may read."""


def is_allowed(origin: str | None, origins: str) -> bool:
    """Return whether a page of `origin` may call, where `origins` are configured; None is no page of another origin."""
    return origin is not None and not {origin, "*"}.isdisjoint(origins_in(origins))


def cors_headers(origin: str, asked: str | None = None) -> dict[str, str]:
    """Return what lets a page of `origin` read an answer, and send a request that has the headers `asked`."""
    read = {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": EXPOSED}
    if asked is None:
        return read
    methods = {
        "Access-Control-Allow-Methods": "GET, HEAD, POST, PUT, DELETE",
        "Access-Control-Max-Age": "600",
    }
    return read | methods | {"Access-Control-Allow-Headers": asked}


def served(route: Route) -> web.RouteDef:
    """The route for aiohttp: its handler runs once the request is allowed, and finds its tenant."""
    options = {"allow_head": route.head} if route.method == GET else {}
    return web.RouteDef(route.method, route.path, partial(_allowed, route), options)


async def _allowed(route: Route, request: web.Request) -> web.StreamResponse:
    """What the handler of `route` answers, once the request is allowed and its tenant found."""
    gateway = request.app[GATEWAY]
    request[ROUTE] = route
    if "job_id" in request.match_info:
        request[JOB_ID] = request.match_info["job_id"]
    for name in SINGLE:  # of two keys, a proxy and the gateway could read another one
        if len(given := request.headers.getall(name, ())) > 1:
            why, received = "The header is given twice.", f"{len(given)} headers"
            raise InvalidField(why, field=name, received=received, accepted="one header")
    authorization = request.headers.get("Authorization")
    written = password(authorization) if route.basic else None
    if route.method != GET:  # a page of another site cannot read what a GET answers
        # browsers remember passwords, and send them by themselves: `*` trusts no page with those
        keyed = gateway.keys is not None and written is None
        origin = request.headers.get("Origin")
        own = {request.host, urlsplit(gateway.config.public_url).netloc}
        trusted = origin in origins_in(gateway.config.cors_origins)
        check_site(request.headers.get("Sec-Fetch-Site"), origin, own, keyed=keyed or trusted)
    if route.keyed:
        tenant = request[TENANT] = gateway.tenant(written or bearer(authorization))
        if isinstance(request.protocol, _Connection):
            request.protocol.known_as(tenant)
    return await route.handler(request)


# The application, listening, and its end.


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
        gateway,
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


def _application(gateway: Gateway) -> web.Application:
    tracing = [traced] if spans.is_on() else []
    app = web.Application(
        middlewares=[_counted, _preflighted, *tracing, errors_as_json],
        client_max_size=gateway.config.max_request_bytes,
    )
    app.on_response_prepare.append(_tell)
    app[GATEWAY] = gateway
    app[resources.ASSETS] = resources.load_assets()
    app[AWAITED_JOBS] = AwaitedJobs()
    routes = (*ROUTES, *(A1111_ROUTES if gateway.config.a1111 else ()))
    app[resources.FRAMES] = resources.FleetFrames()
    app[resources.DOCUMENT] = document(routes)
    app.add_routes([*map(served, routes), *resources.PAGES])
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
    if asks and origin and is_allowed(origin, request.app[GATEWAY].config.cors_origins):
        asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
        return web.Response(status=204, headers=cors_headers(origin, asked))
    return await handler(request)


async def _tell(request: web.Request, response: web.StreamResponse) -> None:
    """Before an answer's headers: what the tenant may still ask for, whether the job is repeated, whether we leave."""
    gateway, route = request.app[GATEWAY], request.get(ROUTE)
    response.headers[hdrs.SERVER] = SERVER
    response.headers[REQUEST_ID_HEADER] = _request_id(request)
    origin = request.headers.get(hdrs.ORIGIN)
    if gateway.config.cors_origins:
        response.headers[hdrs.VARY] = "Origin"  # of each answer: caches would give one origin's to all
    if origin and is_allowed(origin, gateway.config.cors_origins):
        response.headers.update(cors_headers(origin))
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
