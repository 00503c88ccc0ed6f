"""What the gateway tells of itself and of the fleet: health, readiness, metrics, models, the document of the API."""

from __future__ import annotations

import asyncio

import nats.errors
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from giornata.wire.errors import GiornataError
from giornata_gateway.http.edits import tenant_of_request
from giornata_gateway.http.errors import GATEWAY, json_answer
from giornata_gateway.http.openapi import document
from giornata_gateway.views.catalog import HealthView, model_list, ready_view

CHECK_S = 2.0
"""A dependency that takes longer to answer counts as gone."""
RETRY = {"Retry-After": "1"}


async def healthz(request: web.Request) -> web.Response:
    """200 while this process, its NATS connection and its blob store answer; else 503."""
    nats_state, blobs_state = await asyncio.gather(_nats_state(request), _blobs_state(request))
    healthy = nats_state == blobs_state == "ok"
    view = HealthView(healthy=healthy, nats=nats_state, blobs=blobs_state)
    return _state_answer(view, healthy)


async def readyz(request: web.Request) -> web.Response:
    """200 while an edit would be carried out: router, prepost and a denoiser are ready; else 503."""
    gateway = request.app[GATEWAY]
    draining = gateway.departure.announced.is_set()
    view = ready_view(gateway.fleet.cards(), gateway.fleet.missing(), draining=draining)
    return _state_answer(view, view.ready)


async def metrics(request: web.Request) -> web.Response:
    """Prometheus' text format."""
    body = request.app[GATEWAY].metrics.exposition()
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def models(request: web.Request) -> web.Response:
    """Models that can be asked for."""
    tenant_of_request(request)
    return json_answer(model_list(request.app[GATEWAY].fleet.cards()))


async def openapi(request: web.Request) -> web.Response:
    """This API, from the types that validate it."""
    return web.json_response(document(request.app[GATEWAY].config.public_url))


def _state_answer(view: BaseModel, good: bool) -> web.Response:  # noqa: FBT001 - it is what the answer says
    return json_answer(view, status=200 if good else 503, headers=None if good else RETRY)


async def _nats_state(request: web.Request) -> str:
    client = request.app[GATEWAY].bus.client
    if not client.is_connected:
        return "not connected"
    try:
        await client.flush(timeout=int(CHECK_S))
    except (nats.errors.Error, OSError) as error:
        return f"does not answer: {type(error).__name__}"
    return "ok"


async def _blobs_state(request: web.Request) -> str:
    try:
        async with asyncio.timeout(CHECK_S):
            await request.app[GATEWAY].blobs.ping()
    except TimeoutError:
        return "does not answer in time"
    except GiornataError as error:
        return error.message
    return "ok"
