"""The OpenAPI 3.1 document, made from the route table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from giornata import __version__
from giornata.wire.adapters import CONTROL_IMAGES
from giornata.wire.errors import BY_CODE
from giornata.wire.requests import MAX_REFERENCES, REFERENCE
from giornata_gateway.http.responses import HTTP_ERRORS, JSON
from giornata_gateway.http.routes import ROUTES, Body, EventStream, Json, Reply, Route
from giornata_gateway.rules.forms import LoraForm
from giornata_gateway.rules.idempotency import HEADER, MAX_CHARACTERS
from giornata_gateway.views.answers import ErrorAnswer

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
    for form in (route.json_form for route in routes if route.json_form):
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
