"""Connections of the HTTP door: how many there may be, how long a request's head may take, and which peers are gone.

aiohttp limits none of that: it waits for the rest of a head until its keep-alive timeout ends, and for a peer that
vanished as long as the kernel does, which is hours.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from giornata.shares import SharedPool, TenantAllocation
from giornata.wire.errors import (
    BadRequest,
    GiornataError,
    InternalError,
    RequestTimeout,
    TooManyConnections,
)
from giornata_gateway.http.responses import SERVER, error_answer, http_answer
from giornata_gateway.rules.tenants import Tenant
from giornata_gateway.views.jobs import ErrorAnswer, error_detail

PROBES: Final = 4
"""How often a silent peer is asked for a sign of life within the time that it may take."""
PIECE_BYTES: Final = 16 << 10
"""Parsed at a time. Bytes that come as chunks of one take 15 µs each, and a read of 256 KiB can hold 43,000 of them."""
LOG_EVERY_S: Final = 10.0
"""Malformed requests are told in one line of the log for so long."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on the sockets that one client, or many, may take."""

    head_s: float
    """From a connection's beginning, or a later request's first byte, to the end of the head."""
    idle_s: float
    """Between an answer and the next request's first byte."""
    unheard_s: float
    """How long a peer may acknowledge nothing that is sent to it, and be silent before it is asked for a sign."""
    strangers: SharedPool
    """Connections on which no key was shown yet, by their address; a newer one may take the place of the oldest."""
    known: SharedPool
    """Connections by the tenant that asked last; one that rests may have to go for a tenant that has fewer."""
    refused: Callable[[GiornataError], None]
    """Is told of every connection that is closed by a limit and of the answer that it got."""


class LimitedRunner(web.AppRunner):
    """An application whose connections are limited; `options` are aiohttp's."""

    def __init__(self, app: web.Application, limits: ConnectionLimits, **options: Any) -> None:
        # after an answer that came first, the rest of a body is read for as long as a head may take
        timing: dict[str, Any] = {"keepalive_timeout": limits.idle_s, "lingering_time": limits.head_s}
        super().__init__(app, **timing, **options)
        self._limits = limits

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(made, self._limits, self._kwargs)


class _Server(web.Server):
    """aiohttp's server `made`, which makes connections of our kind."""

    def __init__(self, made: web.Server, limits: ConnectionLimits, options: dict[str, Any]) -> None:
        super().__init__(made.request_handler, **{**options, "request_factory": made.request_factory})
        self.limits = limits
        self._malformed, self._tell_s = 0, 0.0

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

    __slots__ = ("_asked", "_begun", "_holding", "_limits", "_pieces", "_pool", "_server", "_timer")

    def __init__(self, server: _Server, **options: Any) -> None:
        super().__init__(server, **options)
        self._server, self._limits = server, server.limits
        self._begun = False
        """Whether the head that is awaited has begun to come."""
        self._asked = False
        """Whether a whole request has ever come."""
        self._timer: asyncio.TimerHandle | None = None
        self._pool, self._holding = self._limits.strangers, TenantAllocation("")
        self._pieces = deque[bytes]()
        """Bytes that are not parsed yet; the first ones are while they are being parsed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        drop_vanished(transport.get_extra_info("socket"), self._limits.unheard_s)
        self._holding = TenantAllocation(_address(transport), takeable=lambda: True, revoke=self.force_close)
        self._pool.take(self._holding, 1, time.monotonic())
        self._expect()

    def known_as(self, tenant: Tenant) -> None:
        """A request of `tenant` has come; TooManyConnections where it has as many connections as it may."""
        if self._pool is self._limits.known and self._holding.tenant == tenant.name:
            self._holding.moved_s = time.monotonic()
            return
        holding = TenantAllocation(tenant.name, tenant.weight, lambda: not self._busy, self.force_close)
        if not self._limits.known.take(holding, 1, time.monotonic()):
            self._limits.known.outcomes[tenant.name, "refused"] += 1
            most = self._limits.strangers.capacity + self._limits.known.capacity
            accepted = f"{most} connections, shared by the tenants that ask"
            raise TooManyConnections(accepted=accepted, retry_after_s=1)
        self._pool.give_back(self._holding)
        self._pool, self._holding = self._limits.known, holding

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
        self._limits.refused(error)
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
        self._timer = self._loop.call_later(self._limits.head_s, self._too_late)

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
            error = RequestTimeout(message, accepted=f"{self._limits.head_s:g} s")
            self._limits.refused(error)
            if self.transport is not None:
                self.transport.write(answer(error))
        self.force_close()


def claim(request: web.Request, tenant: Tenant) -> None:
    """Count the connection of a request as its tenant's, as :meth:`_Connection.known_as`."""
    if isinstance(request.protocol, _Connection):
        request.protocol.known_as(tenant)


def _address(transport: asyncio.BaseTransport) -> str:
    """The peer's, of IPv6 its network's."""
    host = str((transport.get_extra_info("peername") or ("",))[0])
    return str(ipaddress.ip_network(f"{host}/64", strict=False)) if ":" in host else host


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


def answer(error: GiornataError) -> bytes:
    """An error as a whole answer that closes its connection."""
    body = ErrorAnswer(error=error_detail(error.body())).model_dump_json().encode()
    retry = f"Retry-After: {error.retry_after_s:.0f}\r\n" if error.retry_after_s else ""
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        "Content-Type: application/json; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nServer: {SERVER}\r\n{retry}Connection: close\r\n\r\n"
    )
    return head.encode() + body
