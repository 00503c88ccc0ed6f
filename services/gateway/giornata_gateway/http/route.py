"""A route as one value: what aiohttp serves and what the OpenAPI document says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import hdrs, web
from pydantic import BaseModel

from giornata_gateway.http.errors import GATEWAY, JOB_ID, TENANT, Handler
from giornata_gateway.intake.rules.tenants import bearer, check_site

Json = dict[str, Any]

CHANGING: Final = frozenset({hdrs.METH_POST, hdrs.METH_DELETE})
"""Methods that change something. A page of another site cannot read what the other methods answer."""

Body = type[BaseModel] | tuple[type[BaseModel], ...] | Json
"""A view, the events of a stream, or a schema."""


@dataclass(frozen=True)
class Reply:
    """What a route answers beside its errors."""

    description: str
    bodies: Mapping[str, Body] = field(default_factory=dict)
    """Bodies by content type."""


@dataclass(frozen=True)
class Route:
    """One method of one path."""

    method: str
    path: str
    handler: Handler
    name: str
    """The operation's id in the document."""
    summary: str
    answers: Mapping[int, Reply]
    """Answers by status."""
    errors: tuple[int, ...] = ()
    """Statuses of the errors that it answers, beside 500; the error tree tells their codes."""
    parameters: tuple[Json, ...] = ()
    """Query and header parameters as the document tells them; the path tells its own."""
    form: type[BaseModel] | None = None
    """The fields of a multipart form that asks for pictures."""
    repeatable: bool = False
    """An idempotency key makes one job of several requests."""
    keyed: bool = True
    """Where the gateway has API keys, one is needed."""
    head: bool = True
    """A GET also answers HEAD."""

    def served(self) -> web.RouteDef:
        """The route for aiohttp: its handler runs once the request is allowed, and finds its tenant."""
        options = {"allow_head": self.head} if self.method == hdrs.METH_GET else {}
        return web.RouteDef(self.method, self.path, self._handle, options)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        gateway = request.app[GATEWAY]
        request[ROUTE] = self
        if "job_id" in request.match_info:
            request[JOB_ID] = request.match_info["job_id"]
        if self.method in CHANGING:
            check_site(request.headers.get("Sec-Fetch-Site"), keyed=gateway.keys is not None)
        if self.keyed:
            request[TENANT] = gateway.tenant(bearer(request.headers.get("Authorization")))
        return await self.handler(request)


ROUTE: Final = web.RequestKey("route", Route)
"""The API route that a request is for."""
