"""The HTTP door as an aiohttp application."""

from __future__ import annotations

from typing import Final

from aiohttp import hdrs, web

from giornata_gateway.gateway import Gateway
from giornata_gateway.http import edits, fleet, jobs, status, studio, templates
from giornata_gateway.http.errors import GATEWAY, REPEATED, TENANT, Handler, errors_as_json
from giornata_gateway.intake.rules.idempotency import REPEATED as REPEATED_HEADER
from giornata_gateway.intake.rules.tenants import check_site

ROUTES: Final = (
    web.post("/v1/images/edits", edits.edit),
    web.post("/v1/jobs", jobs.create),
    web.get("/v1/jobs/{job_id}", jobs.status),
    web.delete("/v1/jobs/{job_id}", jobs.cancel),
    web.get("/v1/jobs/{job_id}/events", jobs.events, allow_head=False),
    web.get("/v1/jobs/{job_id}/image", jobs.image),
    web.post("/v1/templates", templates.register),
    web.get("/v1/templates", templates.listed),
    web.get("/v1/templates/{template_id}", templates.status),
    web.delete("/v1/templates/{template_id}", templates.delete),
    web.get("/v1/models", status.models),
    web.get("/v1/fleet", fleet.fleet, allow_head=False),
    web.get("/healthz", status.healthz),
    web.get("/readyz", status.readyz),
    web.get("/metrics", status.metrics),
    web.get("/openapi.json", status.openapi),
)
"""The API; what `/openapi.json` documents."""
PAGES: Final = (
    web.get("/", studio.studio),
    web.get("/docs", studio.docs),
    web.get("/studio/{path:.+}", studio.asset),
)
"""For people."""
ACTING: Final = frozenset({hdrs.METH_POST, hdrs.METH_DELETE})
"""Methods that change something; what the others answer, a page of another site cannot read."""


@web.middleware
async def own_site(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let nothing be changed by pages of other web sites, where no API key keeps them out."""
    if request.method in ACTING:
        keyed = request.app[GATEWAY].keys is not None
        check_site(request.headers.get("Sec-Fetch-Site"), keyed=keyed)
    return await handler(request)


@web.middleware
async def counted(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A request that has come is answered, though the gateway leaves meanwhile."""
    if request.transport is None:
        raise ConnectionAbortedError("The client has left.")
    with request.app[GATEWAY].departure.answering(request.transport):
        return await handler(request)


async def tell(request: web.Request, response: web.StreamResponse) -> None:
    """Before an answer's headers are sent: what the tenant may still ask for, whose job it is, whether we leave."""
    tenant = request.get(TENANT)
    if tenant is not None:
        response.headers.update(request.app[GATEWAY].quotas.headers(tenant))
    if request.get(REPEATED):
        response.headers[REPEATED_HEADER] = "true"
    if request.app[GATEWAY].departure.announced.is_set():
        response.headers[hdrs.CONNECTION] = "close"
        response.force_close()


def build_app(gateway: Gateway) -> web.Application:
    """Routes, errors and limits; everything a handler needs is in `gateway`."""
    app = web.Application(
        middlewares=[counted, errors_as_json, own_site], client_max_size=gateway.config.max_request_bytes
    )
    app.on_response_prepare.append(tell)
    app[GATEWAY] = gateway
    app[studio.ASSETS] = studio.load_assets()
    app.add_routes((*ROUTES, *PAGES))
    return app
