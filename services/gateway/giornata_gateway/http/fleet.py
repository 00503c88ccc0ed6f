"""``/v1/fleet``: what the fleet is doing, once or as a live stream."""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

from giornata_gateway.http.body import write
from giornata_gateway.http.errors import GATEWAY, json_answer
from giornata_gateway.http.sse import HEADERS, frame
from giornata_gateway.views.fleet import EVENT

PERIOD_S: Final = 0.5
"""Between two events of the live stream; telemetry comes 2-4 times a second."""


async def fleet(request: web.Request) -> web.StreamResponse:
    """Every live instance and their sums; again and again where the Accept header asks for an event stream."""
    gateway = request.app[GATEWAY]
    accepted = request.headers.get("Accept", "").split(",", maxsplit=1)[0].partition(";")[0]
    if accepted.strip().lower() != "text/event-stream":
        return json_answer(gateway.fleet.view())
    with gateway.watchers.held():
        response = web.StreamResponse(headers=HEADERS)
        await response.prepare(request)
        while not gateway.departure.begun.is_set():
            await write(request, response, frame(EVENT, gateway.fleet.view()))
            await asyncio.sleep(PERIOD_S)  # the rate of the stream, not a poll
        return response
