"""Every route of the API in one table: aiohttp serves it, and ``/openapi.json`` documents it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from pydantic import BaseModel

from giornata.wire.errors import (
    BY_CODE,
    IdempotencyKeyReused,
    InternalError,
    InvalidField,
    NothingFound,
    ResultExpired,
)
from giornata.wire.models import Task
from giornata.wire.workers import FleetView
from giornata_gateway.http import jobs, requests, resources, status
from giornata_gateway.http.connections import claim
from giornata_gateway.http.responses import GATEWAY, JOB_ID, JSON, TENANT, Handler
from giornata_gateway.rules.forms import (
    EditForm,
    GenerationForm,
    GenerationJobForm,
    JobForm,
    LoraForm,
    MaskForm,
    TemplateForm,
    WrittenEditForm,
)
from giornata_gateway.rules.tenants import bearer, check_site, origins_in, password
from giornata_gateway.views.answers import ImagesAnswer
from giornata_gateway.views.catalog import HealthView, ModelList, ModelView, ReadyView
from giornata_gateway.views.jobs import (
    KINDS,
    CompletedEvent,
    ErrorEvent,
    JobView,
    PartialImageEvent,
    ProgressEvent,
)
from giornata_gateway.views.resources import (
    LoraDeleted,
    LoraList,
    LoraView,
    MaskAnswer,
    TemplateDeleted,
    TemplateList,
    TemplateView,
    WebhookDeleted,
    WebhookList,
    WebhookSecret,
    WebhookView,
)

GET, POST, PUT, DELETE = hdrs.METH_GET, hdrs.METH_POST, hdrs.METH_PUT, hdrs.METH_DELETE

SINGLE: Final = (
    "Authorization",
    "X-Api-Key",
    "Idempotency-Key",
    "Last-Event-ID",
    "Sec-Fetch-Site",
    "Content-Encoding",
)
"""Headers of which a request has one at most; aiohttp sees to Host, Content-Type and those of a body's length."""

Json = dict[str, Any]
FORM: Final = "multipart/form-data"


@dataclass(frozen=True)
class EventStream:
    """Server-sent events: what the data of each is, by the event's name."""

    events: Mapping[str, type[BaseModel]]


Body = type[BaseModel] | EventStream | Json
"""A view, a stream, or a schema."""


@dataclass(frozen=True)
class Reply:
    """The answers of a route beside its errors."""

    description: str
    bodies: Mapping[str, Body] = field(default_factory=dict)
    """By content type."""


@dataclass(frozen=True, eq=False)
class Route:
    """One method of one path."""

    method: str
    path: str
    handler: Handler
    name: str
    """The operation's id in the document."""
    summary: str
    answers: Mapping[int, Reply]
    """By status."""
    errors: tuple[int, ...] = ()
    """Statuses of the errors that it answers, beside 500; the error tree tells their codes."""
    parameters: tuple[Json, ...] = ()
    """Query and header parameters as the document tells them; the path tells its own."""
    form: type[BaseModel] | None = None
    """The fields of a multipart form, beside its files."""
    json_form: type[BaseModel] | None = None
    """The fields of a JSON object that asks for pictures."""
    json_body: type[BaseModel] | None = None
    """The fields of any other JSON object."""
    basic: bool = False
    """The key may also come as the password of HTTP Basic."""
    repeatable: bool = False
    """An idempotency key makes one job of several requests."""
    keyed: bool = True
    """Where the gateway has API keys, one is needed."""
    head: bool = True
    """A GET also answers HEAD."""

    @property
    def bodies(self) -> dict[str, type[BaseModel]]:
        """Return what a request's body is, by content type; empty for a route without one."""
        both = {FORM: self.form, JSON: self.json_form or self.json_body}
        return {kind: body for kind, body in both.items() if body is not None}

    def served(self) -> web.RouteDef:
        """The route for aiohttp: its handler runs once the request is allowed, and finds its tenant."""
        options = {"allow_head": self.head} if self.method == GET else {}
        return web.RouteDef(self.method, self.path, self._handle, options)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        gateway = request.app[GATEWAY]
        request[ROUTE] = self
        if "job_id" in request.match_info:
            request[JOB_ID] = request.match_info["job_id"]
        check_once(request)
        authorization = request.headers.get("Authorization")
        written = password(authorization) if self.basic else None
        if self.method != GET:  # a page of another site cannot read what a GET answers
            # browsers remember passwords, and send them by themselves: `*` trusts no page with those
            keyed = gateway.keys is not None and written is None
            origin = request.headers.get("Origin")
            own = {request.host, urlsplit(gateway.config.public_url).netloc}
            trusted = origin in origins_in(gateway.config.cors_origins)
            check_site(request.headers.get("Sec-Fetch-Site"), origin, own, keyed=keyed or trusted)
        if self.keyed:
            request[TENANT] = gateway.tenant(written or bearer(authorization))
            claim(request, request[TENANT])
        return await self.handler(request)


def check_once(request: web.Request) -> None:
    """Raise InvalidField where a header is given twice: of two keys, a proxy and the gateway could read another one."""
    for name in SINGLE:
        if len(given := request.headers.getall(name, ())) > 1:
            received = f"{len(given)} headers"
            raise InvalidField(
                "The header is given twice.", field=name, received=received, accepted="one header"
            )


ROUTE: Final = web.RequestKey("route", Route)
"""The API route that a request is for."""

STREAM: Final = "text/event-stream"
TEXT: Final[Json] = {"type": "string"}
PICTURES: Final = {"image/png": TEXT, "image/jpeg": TEXT, "image/webp": TEXT}


def _events(*tasks: Task) -> EventStream:
    """Return what a job of one of the `tasks` tells while it runs."""
    told: dict[str, type[BaseModel]] = {}
    for names in (KINDS[task] for task in tasks):
        told |= {
            names.progress: ProgressEvent,
            names.partial_image: PartialImageEvent,
            names.completed: CompletedEvent,
        }
    return EventStream(told | {"error": ErrorEvent})


FLEET: Final = EventStream({status.FLEET_EVENT: FleetView})

EVERY: Final = tuple(sorted({kind.status for kind in BY_CODE.values()} - {InternalError.status}))
"""Any error may meet an edit."""
ONCE: Final = tuple(sorted(set(EVERY) - {IdempotencyKeyReused.status, ResultExpired.status}))
"""Errors of a request that asks for pictures and takes no idempotency key."""

FINDING: Final = tuple(sorted({*ONCE, NothingFound.status}))
"""Errors of a request that looks for something in a picture."""


def _parameter(name: str, schema: Json, place: str = "query") -> Json:
    return {"name": name, "in": place, "schema": schema}


def _whole(least: int, most: int | None, default: int) -> Json:
    limits = {"minimum": least} | ({} if most is None else {"maximum": most})
    return {"type": "integer", **limits, "default": default}


LIMIT: Final = _parameter("limit", _whole(1, requests.MAX_PAGE, requests.DEFAULT_PAGE))
WAIT: Final = _parameter("wait_ms", _whole(0, resources.MAX_WAIT_MS, 0)) | {
    "description": "Reply once it is recorded or could not be, at the latest after so many milliseconds."
}

SETTLED: Final = WAIT | {
    "description": "Reply once it is ready or has failed, at the latest after so many milliseconds."
}

ROUTES: Final = (
    Route(
        POST, "/v1/images/edits", jobs.edit, "edit", "Edit a picture and wait for it.",
        {200: Reply("Edited.", {JSON: ImagesAnswer, STREAM: _events(Task.EDIT), **PICTURES})},
        EVERY, form=EditForm, json_form=WrittenEditForm, repeatable=True,
    ),
    Route(
        POST, "/v1/images/generations", jobs.generate, "generate", "Make pictures from text and wait for them.",
        {200: Reply("Made.", {JSON: ImagesAnswer, STREAM: _events(Task.GENERATE), **PICTURES})},
        EVERY, json_form=GenerationForm, repeatable=True,
    ),
    Route(
        POST, "/v1/images/variations", jobs.vary, "vary", "Refused: no served model makes variations of a picture.",
        {}, (400, 401, 403),
    ),
    Route(
        POST, "/v1/jobs", jobs.create, "createJob",
        "Submit an edit, or as JSON a generation, and do not wait.",
        {202: Reply("Accepted; Location names the job.", {JSON: JobView})},
        EVERY, form=JobForm, json_form=GenerationJobForm, repeatable=True,
    ),
    Route(
        GET, "/v1/jobs/{job_id}", jobs.status, "getJob", "How far a job is.",
        {200: Reply("Its status.", {JSON: JobView})}, (401, 404),
    ),
    Route(
        DELETE, "/v1/jobs/{job_id}", jobs.cancel, "cancelJob", "Cancel a job.",
        {
            202: Reply("It ends at its next step.", {JSON: JobView}),
            200: Reply("It had ended before and stays as it is.", {JSON: JobView}),
        },
        (401, 403, 404),
    ),
    Route(
        GET, "/v1/jobs/{job_id}/events", jobs.events, "followJob", "A job's events, all or after Last-Event-ID.",
        {200: Reply("Until the job ends.", {STREAM: _events(*Task)}), 204: Reply("Nothing left to tell.")},
        (400, 401, 404, 429, 503), (_parameter("Last-Event-ID", {"type": "integer"}, "header"),), head=False,
    ),
    Route(
        GET, "/v1/jobs/{job_id}/image", jobs.image, "getImage", "One picture; its ETag is its sha-256.",
        {200: Reply("The picture.", PICTURES), 304: Reply("If-None-Match named it.")},
        (400, 401, 404, 409, 410, 503), (_parameter("index", _whole(0, None, 0)),),
    ),
    Route(
        POST, "/v1/masks", resources.make_mask, "makeMask", "Find what words name in a picture.",
        {200: Reply("Found.", {JSON: MaskAnswer, "image/png": TEXT})}, FINDING, form=MaskForm,
    ),
    Route(
        POST, "/v1/templates", resources.register_template, "registerTemplate", "Register a picture for its edits.",
        {202: Reply("A worker records it; Location names it.", {JSON: TemplateView})}, ONCE, form=TemplateForm,
    ),
    Route(
        GET, "/v1/templates", resources.list_templates, "listTemplates", "The tenant's templates.",
        {200: Reply("The newest first.", {JSON: TemplateList})}, (400, 401, 503), (LIMIT, _parameter("after", TEXT)),
    ),
    Route(
        GET, "/v1/templates/{template_id}", resources.template_status, "getTemplate", "How far a template is.",
        {200: Reply("Its state.", {JSON: TemplateView})}, (400, 401, 404, 429, 503), (WAIT,),
    ),
    Route(
        DELETE, "/v1/templates/{template_id}", resources.delete_template, "deleteTemplate", "Forget a template.",
        {200: Reply("Forgotten.", {JSON: TemplateDeleted})}, (401, 403, 404, 503),
    ),
    Route(
        POST, "/v1/loras", resources.upload_lora, "uploadLora", "Upload a LoRA for a model.",
        {202: Reply("Its file is whole and is checked; Location names it.", {JSON: LoraView})}, ONCE, form=LoraForm,
    ),
    Route(
        GET, "/v1/loras", resources.list_loras, "listLoras", "The LoRAs that the tenant may use, and its uploads.",
        {200: Reply("The newest first.", {JSON: LoraList})}, (400, 401, 503), (LIMIT, _parameter("after", TEXT)),
    ),
    Route(
        GET, "/v1/loras/{lora_id}", resources.lora_status, "getLora", "How far a LoRA is.",
        {200: Reply("Its state.", {JSON: LoraView})}, (400, 401, 404, 429, 503), (SETTLED,),
    ),
    Route(
        PUT, "/v1/loras/{lora_id}/pin", resources.pin_lora, "pinLora", "Have every host keep a LoRA.",
        {200: Reply("It is pinned.", {JSON: LoraView})}, (401, 403, 404, 409, 503, 504),
    ),
    Route(
        DELETE, "/v1/loras/{lora_id}/pin", resources.pin_lora, "unpinLora", "Let hosts let go of a LoRA again.",
        {200: Reply("It is not pinned.", {JSON: LoraView})}, (401, 403, 404, 503, 504),
    ),
    Route(
        DELETE, "/v1/loras/{lora_id}", resources.delete_lora, "deleteLora", "Forget a LoRA or stop an upload.",
        {200: Reply("Forgotten.", {JSON: LoraDeleted})}, (401, 403, 404, 503, 504),
    ),
    Route(
        GET, "/v1/webhooks", resources.list_webhooks, "listWebhooks", "The tenant's webhooks that were not taken yet.",
        {200: Reply("The newest first.", {JSON: WebhookList})}, (400, 401, 503), (LIMIT, _parameter("after", TEXT)),
    ),
    Route(
        GET, "/v1/webhook-secret", resources.webhook_secret, "getWebhookSecret",
        "The secret that signs the tenant's webhooks.",
        {200: Reply("For libraries of Standard Webhooks.", {JSON: WebhookSecret})}, (400, 401),
    ),
    Route(
        PUT, "/v1/webhooks/{job_id}", resources.retry_webhook, "retryWebhook",
        "Send a webhook that was given up again.",
        {200: Reply("It is sent soon.", {JSON: WebhookView})}, (401, 403, 404, 503),
    ),
    Route(
        DELETE, "/v1/webhooks/{job_id}", resources.delete_webhook, "deleteWebhook", "Send a webhook no more.",
        {200: Reply("Forgotten.", {JSON: WebhookDeleted})}, (401, 403, 404, 503),
    ),
    Route(
        GET, "/v1/models", status.models, "listModels", "Served models.",
        {200: Reply("Served models.", {JSON: ModelList})}, (401,),
    ),
    Route(
        GET, "/v1/models/{model}", status.model, "getModel", "One served model, by its name or an alias.",
        {200: Reply("The model.", {JSON: ModelView})}, (401, 404),
    ),
    Route(
        GET, "/v1/fleet", status.fleet, "getFleet",
        "What the fleet is doing; a live stream of it where the Accept header asks for text/event-stream.",
        {
            200: Reply(
                "Every live instance and their sums; null is unknown. In the stream, the data of each event `fleet`, "
                "where what is null is left out.",
                {JSON: FleetView, STREAM: FLEET},
            )
        },
        (401, 429), head=False,
    ),
    Route(
        GET, "/healthz", status.healthz, "getHealth", "200 while process, NATS and blob store answer, else 503.",
        {200: Reply("Healthy.", {JSON: HealthView}), 503: Reply("Not healthy.", {JSON: HealthView})}, keyed=False,
    ),
    Route(
        GET, "/readyz", status.readyz, "getReadiness", "200 while an edit would be carried out, else 503.",
        {200: Reply("Ready.", {JSON: ReadyView}), 503: Reply("Not ready.", {JSON: ReadyView})}, keyed=False,
    ),
    Route(
        GET, "/metrics", status.metrics, "getMetrics", "Prometheus metrics.",
        {200: Reply("Text.", {"text/plain": TEXT})}, keyed=False,
    ),
    Route(
        GET, "/openapi.json", status.openapi, "getDocument", "This document.",
        {200: Reply("It.", {JSON: {"type": "object"}})}, keyed=False,
    ),
)  # fmt: skip
"""The API."""
