"""``/v1/fleet``: what the fleet is doing, once or as a live stream."""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

from giornata_gateway.http.body import write
from giornata_gateway.http.edits import tenant_of_request
from giornata_gateway.http.errors import GATEWAY, json_answer
from giornata_gateway.http.sse import frame
from giornata_gateway.http.stream import HEADERS
from giornata_gateway.views.fleet import EVENT

PERIOD_S: Final = 0.5
"""Between two events of the live stream; telemetry comes 2-4 times a second."""


async def fleet(request: web.Request) -> web.StreamResponse:
    """Every live instance and their sums; again and again where the Accept header asks for an event stream."""
    tenant_of_request(request)
    gateway = request.app[GATEWAY]
    if not _prefers_stream(request.headers.get("Accept", "")):
        return json_answer(gateway.fleet.view())
    with gateway.watching():
        response = web.StreamResponse(headers=HEADERS)
        await response.prepare(request)
        while not gateway.departure.begun.is_set():
            await write(request, response, frame(EVENT, gateway.fleet.view()))
            await asyncio.sleep(PERIOD_S)  # the rate of the stream, not a poll
        return response


def _prefers_stream(accept: str) -> bool:
    return accept.split(",", maxsplit=1)[0].partition(";")[0].strip().lower() == "text/event-stream"
