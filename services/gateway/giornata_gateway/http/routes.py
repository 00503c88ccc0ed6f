"""Every route of the API in one table: aiohttp serves it, and the OpenAPI 3.1 document is made from it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.resources import files
from typing import Any, Final

from aiohttp import hdrs
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from giornata import __version__
from giornata.wire.adapters import CONTROL_IMAGES
from giornata.wire.errors import (
    BY_CODE,
    IdempotencyKeyReused,
    InternalError,
    NothingFound,
    ResultExpired,
)
from giornata.wire.models import Task
from giornata.wire.requests import MAX_REFERENCES, REFERENCE
from giornata.wire.workers import FleetView
from giornata_gateway.http import jobs, resources
from giornata_gateway.http.requests import FORM
from giornata_gateway.http.responses import HTTP_ERRORS, JSON, Handler
from giornata_gateway.jobs.preparation import HEADER, MAX_CHARACTERS
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
from giornata_gateway.views.catalog import HealthView, ModelList, ModelView, ReadyView
from giornata_gateway.views.jobs import (
    KINDS,
    CompletedEvent,
    ErrorAnswer,
    ErrorEvent,
    ImagesAnswer,
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

Json = dict[str, Any]


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
    json_body: type[BaseModel] | None = None
    """The fields of a JSON object."""
    basic: bool = False
    """The key may also come as the password of HTTP Basic."""
    repeatable: bool = False
    """It asks for pictures, and an idempotency key makes one job of several requests."""
    keyed: bool = True
    """Where the gateway has API keys, one is needed."""
    head: bool = True
    """A GET also answers HEAD."""

    @property
    def bodies(self) -> dict[str, type[BaseModel]]:
        """Return what a request's body is, by content type; empty for a route without one."""
        both = {FORM: self.form, JSON: self.json_body}
        return {kind: body for kind, body in both.items() if body is not None}


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


FLEET: Final = EventStream({resources.FLEET_EVENT: FleetView})

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


LIMIT: Final = _parameter("limit", _whole(1, resources.MAX_PAGE, resources.DEFAULT_PAGE))
WAIT: Final = _parameter("wait_ms", _whole(0, resources.MAX_WAIT_MS, 0)) | {
    "description": "Reply once it is recorded or could not be, at the latest after so many milliseconds."
}

SETTLED: Final = WAIT | {
    "description": "Reply once it is ready or has failed, at the latest after so many milliseconds."
}

ROUTES: Final = (
    Route(
        POST, "/v1/images/edits", partial(jobs.carry_out, EditForm), "edit", "Edit a picture and wait for it.",
        {200: Reply("Edited.", {JSON: ImagesAnswer, STREAM: _events(Task.EDIT), **PICTURES})},
        EVERY, form=EditForm, json_body=WrittenEditForm, repeatable=True,
    ),
    Route(
        POST, "/v1/images/generations", partial(jobs.carry_out, GenerationForm), "generate",
        "Make pictures from text and wait for them.",
        {200: Reply("Made.", {JSON: ImagesAnswer, STREAM: _events(Task.GENERATE), **PICTURES})},
        EVERY, json_body=GenerationForm, repeatable=True,
    ),
    Route(
        POST, "/v1/images/variations", jobs.vary, "vary", "Refused: no served model makes variations of a picture.",
        {}, (400, 401, 403),
    ),
    Route(
        POST, "/v1/jobs", jobs.create, "createJob",
        "Submit an edit, or as JSON a generation, and do not wait.",
        {202: Reply("Accepted; Location names the job.", {JSON: JobView})},
        EVERY, form=JobForm, json_body=GenerationJobForm, repeatable=True,
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
        GET, "/v1/templates", resources.TEMPLATES.list, "listTemplates", "The tenant's templates.",
        {200: Reply("The newest first.", {JSON: TemplateList})}, (400, 401, 503), (LIMIT, _parameter("after", TEXT)),
    ),
    Route(
        GET, "/v1/templates/{template_id}", resources.TEMPLATES.status, "getTemplate", "How far a template is.",
        {200: Reply("Its state.", {JSON: TemplateView})}, (400, 401, 404, 429, 503), (WAIT,),
    ),
    Route(
        DELETE, "/v1/templates/{template_id}", resources.TEMPLATES.delete, "deleteTemplate", "Forget a template.",
        {200: Reply("Forgotten.", {JSON: TemplateDeleted})}, (401, 403, 404, 503),
    ),
    Route(
        POST, "/v1/loras", resources.upload_lora, "uploadLora", "Upload a LoRA for a model.",
        {202: Reply("Its file is whole and is checked; Location names it.", {JSON: LoraView})}, ONCE, form=LoraForm,
    ),
    Route(
        GET, "/v1/loras", resources.LORAS.list, "listLoras", "The LoRAs that the tenant may use, and its uploads.",
        {200: Reply("The newest first.", {JSON: LoraList})}, (400, 401, 503), (LIMIT, _parameter("after", TEXT)),
    ),
    Route(
        GET, "/v1/loras/{lora_id}", resources.LORAS.status, "getLora", "How far a LoRA is.",
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
        DELETE, "/v1/loras/{lora_id}", resources.LORAS.delete, "deleteLora", "Forget a LoRA or stop an upload.",
        {200: Reply("Forgotten.", {JSON: LoraDeleted})}, (401, 403, 404, 503, 504),
    ),
    Route(
        GET, "/v1/webhooks", resources.WEBHOOKS.list, "listWebhooks", "The tenant's webhooks that were not taken yet.",
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
        DELETE, "/v1/webhooks/{job_id}", resources.WEBHOOKS.delete, "deleteWebhook", "Send a webhook no more.",
        {200: Reply("Forgotten.", {JSON: WebhookDeleted})}, (401, 403, 404, 503),
    ),
    Route(
        GET, "/v1/models", resources.models, "listModels", "Served models.",
        {200: Reply("Served models.", {JSON: ModelList})}, (401,),
    ),
    Route(
        GET, "/v1/models/{model}", resources.model, "getModel", "One served model, by its name or an alias.",
        {200: Reply("The model.", {JSON: ModelView})}, (401, 404),
    ),
    Route(
        GET, "/v1/fleet", resources.fleet, "getFleet",
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
        GET, "/healthz", resources.healthz, "getHealth", "200 while process, NATS and blob store answer, else 503.",
        {200: Reply("Healthy.", {JSON: HealthView}), 503: Reply("Not healthy.", {JSON: HealthView})}, keyed=False,
    ),
    Route(
        GET, "/readyz", resources.readyz, "getReadiness", "200 while an edit would be carried out, else 503.",
        {200: Reply("Ready.", {JSON: ReadyView}), 503: Reply("Not ready.", {JSON: ReadyView})}, keyed=False,
    ),
    Route(
        GET, "/metrics", resources.metrics, "getMetrics", "Prometheus metrics.",
        {200: Reply("Text.", {"text/plain": TEXT})}, keyed=False,
    ),
    Route(
        GET, "/openapi.json", resources.openapi, "getDocument", "This document.",
        {200: Reply("It.", {JSON: {"type": "object"}})}, keyed=False,
    ),
)  # fmt: skip
"""The API."""


ID: Final = "$response.body#/id"
JOB: Final = "$response.body#/giornata/job_id"
FIRST: Final = "$response.body#/data/0/id"

_JOB: Final = ("getJob", "followJob", "getImage", "cancelJob")
_TEMPLATE: Final = ("getTemplate", "deleteTemplate")
_LORA: Final = ("getLora", "pinLora", "unpinLora", "deleteLora")

FOLLOWED: Final[Mapping[str, tuple[str, str, tuple[str, ...]]]] = {
    "edit": ("job_id", JOB, _JOB[:3]),
    "generate": ("job_id", JOB, _JOB[:3]),
    "createJob": ("job_id", ID, _JOB),
    "getJob": ("job_id", ID, _JOB),
    "cancelJob": ("job_id", ID, _JOB[:3]),
    "registerTemplate": ("template_id", ID, _TEMPLATE),
    "listTemplates": ("template_id", FIRST, _TEMPLATE),
    "getTemplate": ("template_id", ID, _TEMPLATE),
    "uploadLora": ("lora_id", ID, _LORA),
    "listLoras": ("lora_id", FIRST, _LORA),
    "getLora": ("lora_id", ID, _LORA),
    "pinLora": ("lora_id", ID, _LORA),
    "unpinLora": ("lora_id", ID, _LORA),
    "listModels": ("model", FIRST, ("getModel",)),
    "listWebhooks": ("job_id", FIRST, ("retryWebhook", "deleteWebhook", "getJob")),
    "retryWebhook": ("job_id", ID, ("deleteWebhook", "getJob")),
}
"""By operation: which parameter, what it is, and the operations that take it."""


RETRY_AFTER: Final = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}}
RATE_LIMIT: Final = {
    "RateLimit-Policy": {
        "schema": {"type": "string"},
        "description": "Where the tenant has a limit: pictures (`q`) in so many seconds (`w`).",
    },
    "RateLimit": {
        "schema": {"type": "string"},
        "description": "Where the tenant has a limit: pictures that are left (`r`), and seconds until all are (`t`).",
    },
}
REPLAYED: Final = {
    "Idempotent-Replayed": {
        "schema": {"const": "true"},
        "description": "The answer is about the job of an earlier request with the same Idempotency-Key.",
    }
}
KEY: Final = {
    "name": HEADER,
    "in": "header",
    "description": "The same key with the same edit is one job, however often it is asked for.",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_CHARACTERS, "pattern": "^[ -~]+$"},
}
EVENT_ID: Final = {"type": "string", "pattern": "^[0-9]+$", "description": "For Last-Event-ID."}
EVENTS_TEXT: Final = "One server-sent event; comments and `retry` may stand between them."
BINARY: Final = {"type": "string", "contentMediaType": "application/octet-stream"}
IMAGE: Final = {**BINARY, "description": "The picture: PNG, JPEG or WebP. `image[]` is accepted too."}
LORA: Final = {**BINARY, "description": "A file of safetensors: see the page on LoRAs for what is accepted."}
MASK: Final = {**BINARY, "description": "What to repaint; see `mask_mode`."}
LOOKED_AT: Final = (
    "Other pictures that the model looks at, in their order; `GET /v1/models` tells how many a model takes"
)
REFERENCES: Final = {
    "type": "array",
    "items": BINARY,
    "maxItems": MAX_REFERENCES,
    "description": f"{LOOKED_AT}. Repeat the part, or number it: `reference_0`. After the first `image[]`, every "
    "other one is a reference, too.",
}
WRITTEN_REFERENCES: Final = {
    "type": "array",
    "items": {"type": "string", "contentEncoding": "base64"},
    "maxItems": MAX_REFERENCES,
    "description": f"{LOOKED_AT}. Base64 or data URLs.",
}


CONTROL: Final = "What ControlNets see; `image` of `controlnets` names it by its number."
WRITTEN: Final = {"type": "string", "contentEncoding": "base64"}


@cache
def document(routes: tuple[Route, ...] = ROUTES) -> Json:
    """The document of `routes` at the address that served it. Making it takes 150 ms; callers share one and copy it."""
    words = (files("giornata_gateway.http") / "openapi.md").read_text(encoding="utf-8")
    paths: Json = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Giornata",
            "version": __version__,
            "description": words + _codes(),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"bearer": []}],
        "paths": paths,
        "components": {
            "schemas": _schemas(routes),
            "securitySchemes": {kind: {"type": "http", "scheme": kind} for kind in ("bearer", "basic")},
        },
    }


def _codes() -> str:
    """Every error code with its status, as a table."""
    lines = ["\n| code | status | meaning |", "|---|---|---|"]
    for code, kind in sorted(BY_CODE.items(), key=lambda item: (item[1].status, item[0])):
        lines.append(f"| `{code}` | {kind.status} | {(kind.__doc__ or '').strip()} |")
    lines += [f"| `{code}` | {status} | {text} |" for status, (code, text) in HTTP_ERRORS.items()]
    return "\n".join(lines) + "\n"


def _operation(route: Route) -> Json:
    told = {str(status): _answer(status, answer) for status, answer in route.answers.items()}
    if route.name in FOLLOWED:
        parameter, expression, followers = FOLLOWED[route.name]
        links = {name: {"operationId": name, "parameters": {parameter: expression}} for name in followers}
        for status, reply in route.answers.items():
            if JSON in reply.bodies:
                told[str(status)]["links"] = links
    if route.bodies:
        for answer in told.values():
            answer["headers"] = RATE_LIMIT | (REPLAYED if route.repeatable else {})
    told |= {str(status): _error(status, route) for status in (*route.errors, 500)}
    parameters = [
        *(
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"{(\w+)}", route.path)
        ),
        *route.parameters,
        *([KEY] if route.repeatable else []),
    ]
    operation: Json = {"operationId": route.name, "summary": route.summary, "responses": told}
    if route.basic:
        operation["security"] = [{}, {"bearer": []}, {"basic": []}]
    if parameters:
        operation["parameters"] = parameters
    if route.bodies:
        content = {kind: _media(body) for kind, body in route.bodies.items()}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _answer(status: int, answer: Reply) -> Json:
    told: Json = {"description": answer.description}
    if answer.bodies:
        told["content"] = {kind: _media(body) for kind, body in answer.bodies.items()}
    if status in {429, 503}:
        told["headers"] = RETRY_AFTER
    return told


def _error(status: int, route: Route) -> Json:
    """The answer with an HTTP status, and the codes that it may have."""
    codes = sorted(code for code, kind in BY_CODE.items() if kind.status == status)
    told = _answer(status, Reply(", ".join(f"`{code}`" for code in codes), {"application/json": ErrorAnswer}))
    if status == 429 and route.bodies:
        told["headers"] = RETRY_AFTER | RATE_LIMIT
    return told


def _media(body: Body) -> Json:
    if isinstance(body, dict):
        return {"schema": body}
    if isinstance(body, EventStream):
        return _stream(body)
    return {"schema": _reference(body)}


def _stream(stream: EventStream) -> Json:
    """Return what each event is, in the form of OpenAPI 3.2's ``itemSchema``.

    There is no ``schema``: readers differ in whether it would describe the whole text or an event.
    """
    events = [
        {
            "type": "object",
            "required": ["event", "data"],
            "properties": {
                "event": {"const": name},
                "id": EVENT_ID,
                "data": {
                    "type": "string",
                    "contentMediaType": "application/json",
                    "contentSchema": _reference(kind),
                },
            },
        }
        for name, kind in stream.events.items()
    ]
    return {"x-itemSchema": {"description": EVENTS_TEXT, "oneOf": events}}


def _reference(kind: type[BaseModel]) -> Json:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _schemas(routes: Sequence[Route]) -> Json:
    """The forms and views that the routes name."""
    forms = [route.form for route in routes if route.form]
    asked = dict.fromkeys(body for route in routes for body in route.bodies.values())
    views = {ErrorAnswer: None} | {view: None for route in routes for view in _views(route)}
    _, schema = models_json_schema(
        [*((form, "validation") for form in asked), *((view, "serialization") for view in views)],
        ref_template="#/components/schemas/{model}",
    )
    schemas: Json = schema["$defs"]
    for form in forms:
        told = schemas[form.__name__]
        if form is LoraForm:
            told["properties"]["file"], told["required"] = LORA, ["file"]
            continue
        told["properties"]["image"] = IMAGE
        if "template_id" in form.model_fields:
            told["properties"] |= {"mask": MASK, REFERENCE: REFERENCES} | _controls(BINARY)
            told["oneOf"] = [{"required": ["image"]}, {"required": ["template_id"]}]
        else:
            told["required"] = ["image", *told.get("required", [])]
    for form in (route.json_body for route in routes if route.repeatable and route.json_body):
        schemas[form.__name__]["properties"] |= {REFERENCE: WRITTEN_REFERENCES} | _controls(WRITTEN)
    return schemas


def _controls(kind: Json) -> Json:
    """The control images of a form; `kind` is how files travel in it."""
    return {name: {**kind, "description": CONTROL} for name in CONTROL_IMAGES}


def _views(route: Route) -> Iterable[type[BaseModel]]:
    for answer in route.answers.values():
        for body in answer.bodies.values():
            if isinstance(body, EventStream):
                yield from body.events.values()
            elif not isinstance(body, dict):
                yield body
