"""The HTTP door as an aiohttp application."""

from __future__ import annotations

from typing import Final

from aiohttp import hdrs, web

from giornata_gateway.gateway import Gateway
from giornata_gateway.http import status, studio
from giornata_gateway.http.errors import GATEWAY, REPEATED, TENANT, Handler, errors_as_json
from giornata_gateway.http.openapi import document
from giornata_gateway.http.route import ROUTE
from giornata_gateway.http.routes import ROUTES
from giornata_gateway.intake.rules.idempotency import REPEATED as REPEATED_HEADER

PAGES: Final = (
    web.get("/", studio.studio),
    web.get("/docs", studio.docs),
    web.get("/studio/{path:.+}", studio.asset),
)
"""For people."""


@web.middleware
async def counted(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count a request that has come: it is answered, though the gateway leaves meanwhile."""
    if request.transport is None:
        raise ConnectionAbortedError("The client has left.")
    with request.app[GATEWAY].departure.answering(request.transport):
        return await handler(request)


async def tell(request: web.Request, response: web.StreamResponse) -> None:
    """Before an answer's headers: what the tenant may still ask for, whether the job is repeated, whether we leave."""
    gateway, route = request.app[GATEWAY], request.get(ROUTE)
    if route is not None and route.form and TENANT in request:
        response.headers.update(gateway.quotas.headers(request[TENANT]))
    if request.get(REPEATED):
        response.headers[REPEATED_HEADER] = "true"
    if gateway.departure.announced.is_set():
        response.headers[hdrs.CONNECTION] = "close"
        response.force_close()


def build_app(gateway: Gateway) -> web.Application:
    """Routes, errors and limits. Everything that a handler needs is in `gateway`."""
    app = web.Application(
        middlewares=[counted, errors_as_json], client_max_size=gateway.config.max_request_bytes
    )
    app.on_response_prepare.append(tell)
    app[GATEWAY] = gateway
    app[studio.ASSETS] = studio.load_assets()
    app[status.DOCUMENT] = document(ROUTES, gateway.config.public_url)
    app.add_routes([*(route.served() for route in ROUTES), *PAGES])
    return app
