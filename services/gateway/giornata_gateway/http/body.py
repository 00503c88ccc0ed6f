"""Bodies on their way to a client, in pieces or as server-sent events. A client that is too slow is cut off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

import structlog
from aiohttp import hdrs, web
from pydantic import BaseModel

from giornata.wire.errors import TooManyStreams
from giornata_gateway.http.errors import GATEWAY, OUTCOME, TENANT

log = structlog.get_logger(__name__)

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
