"""Where a trace begins: an HTTP request that asks for pictures, or one that brings a trace of its own."""

from __future__ import annotations

from aiohttp import hdrs, web

from giornata.seeing.spans import span
from giornata.seeing.told import TraceSpanKind
from giornata_gateway.http.errors import JOB_ID, OUTCOME, Handler


@web.middleware
async def traced(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer within a span. A request that only asks how the gateway is, or looks at a job, begins no trace."""
    resource = request.match_info.route.resource
    route = "unknown" if resource is None else resource.canonical  # ids do not become names
    begins = request.method == hdrs.METH_POST and route.startswith("/v1/")
    with span(
        f"{request.method} {route}",
        TraceSpanKind.ANSWERS,
        root=begins,
        parent=request.headers,
        method=request.method,
        route=route,
    ) as answering:
        response = await handler(request)
        answering.note(status=response.status)
        if JOB_ID in request:
            answering.note(job=request[JOB_ID])
        if response.status >= 500 or OUTCOME in request:
            answering.fail(request.get(OUTCOME, str(response.status)))
        return response
