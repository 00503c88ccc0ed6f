"""Routes about the gateway and the fleet: health, readiness, metrics, models, instances, the document."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Final

import nats.errors
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from giornata.bus.bus import Bus
from giornata.wire.errors import GiornataError, ServiceUnavailable
from giornata.wire.workers import FleetView, InstanceReport
from giornata_gateway.fleet import FleetListener
from giornata_gateway.http.requests import base_path
from giornata_gateway.http.responses import (
    EVENT_STREAM,
    GATEWAY,
    TENANT,
    frame,
    json_answer,
    looking_on,
    write,
)
from giornata_gateway.views.catalog import (
    HealthView,
    ModelList,
    find_card,
    fleet_view,
    model_list,
    ready_view,
    tenant_view,
)

CHECK_S: Final = 2.0
"""A dependency that takes longer to answer counts as gone."""
PERIOD_S: Final = 0.5
"""Between two events of the fleet's live stream; telemetry comes 2-4 times a second."""
FLEET_EVENT: Final = "fleet"
"""Name of the events of that stream."""
DOCUMENT: Final = web.AppKey("document", dict)
"""The OpenAPI document, made when the gateway starts."""


async def healthz(request: web.Request) -> web.Response:
    """200 while this process, its NATS connection and its blob store answer; else 503."""
    gateway = request.app[GATEWAY]
    blobs = asyncio.wait_for(gateway.blobs.ping(), CHECK_S)
    nats_state, blobs_state = await asyncio.gather(_state(_flushed(gateway.bus)), _state(blobs))
    view = HealthView(healthy=nats_state == blobs_state == "ok", nats=nats_state, blobs=blobs_state)
    return _answer(view, good=view.healthy)


async def readyz(request: web.Request) -> web.Response:
    """200 while an edit would be carried out: services are ready and stores take writes; else 503."""
    gateway = request.app[GATEWAY]
    draining = gateway.departure.announced.is_set()
    known = gateway.fleet
    full = {store: str(error) for store, error in (await gateway.storage.full()).items()}
    view = ready_view(known.cards(), known.missing(), known.nearly_full(), full, draining=draining)
    return _answer(view, good=view.ready)


async def metrics(request: web.Request) -> web.Response:
    """Prometheus' text format."""
    gateway = request.app[GATEWAY]
    await gateway.storage.full()
    body = gateway.metrics.exposition(await gateway.fleet.reports(gateway.bus) or (), gateway.fleet.waits_s())
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def models(request: web.Request) -> web.Response:
    """Models that can be asked for."""
    return json_answer(_models(request.app[GATEWAY].fleet))


async def model(request: web.Request) -> web.Response:
    """The model of a name or an alias; ModelNotFound tells the names there are."""
    fleet = request.app[GATEWAY].fleet
    named = find_card(request.match_info["model"], fleet.cards(), fleet.aliases).name
    return json_answer(next(one for one in _models(fleet).data if one.id == named))


def _models(fleet: FleetListener) -> ModelList:
    return model_list(fleet.cards(), fleet.controlnets(), fleet.masks(), fleet.aliases)


class FleetFrames:
    """Events of the fleet's live streams: each is made once for all streams that tell the same."""

    def __init__(self) -> None:
        self._reports: Sequence[InstanceReport] | None = None
        self._made: dict[int | None, bytes] = {}

    def of(self, reports: Sequence[InstanceReport] | None, own_rows: int | None) -> bytes:
        """The event of `reports` as :func:`_view` shows them; it is made again when they are others."""
        if reports is not self._reports:
            self._reports, self._made = reports, {}
        made = self._made.get(own_rows) or frame(FLEET_EVENT, _view(reports, own_rows))
        return self._made.setdefault(own_rows, made)


FRAMES: Final = web.AppKey("fleet_frames", FleetFrames)


async def fleet(request: web.Request) -> web.StreamResponse:
    """Every live instance and their sums, or what a tenant may know; again and again where an event stream is asked."""
    gateway, tenant = request.app[GATEWAY], request[TENANT]

    async def known() -> tuple[list[InstanceReport] | None, int | None]:
        return await gateway.fleet.reports(
            gateway.bus
        ), None if tenant.operator else gateway.quotas.in_progress(tenant)

    accepted = request.headers.get("Accept", "").split(",", maxsplit=1)[0].partition(";")[0]
    if accepted.strip().lower() != "text/event-stream":
        return json_answer(_view(*await known()))
    response = web.StreamResponse(headers=EVENT_STREAM)
    async with looking_on(request, response):
        await response.prepare(request)
        while not gateway.departure.begun.is_set():
            await write(request, response, request.app[FRAMES].of(*await known()))
            await asyncio.sleep(PERIOD_S)  # the rate of the stream, not a poll
    return response


def _view(reports: Sequence[InstanceReport] | None, own_rows: int | None) -> FleetView:
    """All of `reports` for an operator; a tenant has `own_rows` pictures in progress, and sees less."""
    return fleet_view(reports) if own_rows is None else tenant_view(reports, own_rows)


async def openapi(request: web.Request) -> web.Response:
    """This API, from the table that serves it and the types that validate it."""
    return web.json_response(request.app[DOCUMENT] | {"servers": [{"url": base_path(request) or "/"}]})


def _answer(view: BaseModel, *, good: bool) -> web.Response:
    return json_answer(view, status=200 if good else 503, headers=None if good else {"Retry-After": "1"})


async def _flushed(bus: Bus) -> None:
    if not bus.client.is_connected:
        raise ServiceUnavailable("not connected")
    await bus.client.flush(timeout=int(CHECK_S))


async def _state(check: Awaitable[None]) -> str:
    """`ok`, or what is wrong."""
    try:
        await check
    except TimeoutError:
        return "does not answer in time"
    except GiornataError as error:
        return error.message
    except (nats.errors.Error, OSError) as error:
        return f"does not answer: {type(error).__name__}"
    return "ok"
