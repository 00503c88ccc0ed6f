"""The OpenAPI 3.1 document, generated from the types that validate requests and make answers. Pure."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from giornata import __version__
from giornata.wire.errors import BY_CODE
from giornata_gateway.http.openapi_parts import Json, answer, form, get, operation, ref, text
from giornata_gateway.http.openapi_text import DESCRIPTION
from giornata_gateway.intake.rules.forms import EditForm, JobForm
from giornata_gateway.views.answers import ErrorAnswer, ImagesAnswer
from giornata_gateway.views.catalog import HealthView, ModelList, ReadyView
from giornata_gateway.views.fleet import FleetView
from giornata_gateway.views.jobs import JobView
from giornata_gateway.views.stream import CompletedEvent, ErrorEvent, PartialImageEvent, ProgressEvent
from giornata_gateway.views.templates import (
    DEFAULT_PAGE,
    MAX_PAGE,
    MAX_WAIT_MS,
    TemplateDeleted,
    TemplateForm,
    TemplateList,
    TemplateView,
)

HTTP_ERRORS: Final = {
    404: ("route_not_found", "No such path."),
    405: ("method_not_allowed", "Not with this method."),
}
"""Errors of HTTP itself; all others come from :mod:`giornata.wire.errors`."""


def document(server_url: str) -> Json:
    """The whole document.

    Args:
        server_url: how clients reach this gateway; empty for the address that served the document.
    """
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Giornata",
            "version": __version__,
            "description": DESCRIPTION + _codes(),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": server_url or "/"}],
        "security": [{}, {"bearer": []}],
        "paths": _paths(),
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _codes() -> str:
    """Every error code with its status, as a table."""
    lines = ["\n| code | status | meaning |", "|---|---|---|"]
    for code, kind in sorted(BY_CODE.items(), key=lambda item: (item[1].status, item[0])):
        lines.append(f"| `{code}` | {kind.status} | {(kind.__doc__ or '').strip()} |")
    lines += [f"| `{code}` | {status} | {text} |" for status, (code, text) in HTTP_ERRORS.items()]
    return "\n".join(lines) + "\n"


def _schemas() -> Json:
    forms = [(EditForm, "validation"), (JobForm, "validation"), (TemplateForm, "validation")]
    views: list[type[BaseModel]] = [
        ErrorAnswer, ImagesAnswer, JobView, ModelList, FleetView, ReadyView, HealthView,
        ProgressEvent, PartialImageEvent, CompletedEvent, ErrorEvent,
        TemplateView, TemplateList, TemplateDeleted,
    ]  # fmt: skip
    _, schema = models_json_schema(
        [*forms, *((view, "serialization") for view in views)],  # type: ignore[list-item]  # mypy widens the modes to str
        ref_template="#/components/schemas/{model}",
    )
    schemas: Json = schema["$defs"]
    binary = {"type": "string", "contentMediaType": "application/octet-stream"}
    image = {**binary, "description": "The picture: PNG, JPEG or WebP. `image[]` is accepted too."}
    for name in (EditForm.__name__, JobForm.__name__):
        properties = schemas[name]["properties"]
        properties["image"] = image
        properties["mask"] = {**binary, "description": "What to repaint; see `mask_mode`."}
        schemas[name]["oneOf"] = [{"required": ["image"]}, {"required": ["template_id"]}]
    schemas[TemplateForm.__name__]["properties"]["image"] = image
    schemas[TemplateForm.__name__]["required"] = ["image"]
    return schemas


def _paths() -> Json:
    pictures = {kind: text() for kind in ("image/png", "image/jpeg", "image/webp")}
    edited = {"application/json": ref(ImagesAnswer), "text/event-stream": _stream(), **pictures}
    return {
        "/v1/images/edits": form(
            "edit",
            "Edit a picture and wait for it.",
            EditForm,
            {"200": answer("Edited.", edited)},
            keyed=True,
        ),
        **_job_paths(pictures),
        **_template_paths(),
        "/v1/models": get("listModels", "Served models.", ModelList, 401),
        "/v1/fleet": _fleet(),
        "/healthz": get(
            "getHealth", "200 while process, NATS and blob store answer, else 503.", HealthView, own_503=True
        ),
        "/readyz": get(
            "getReadiness", "200 while an edit would be carried out, else 503.", ReadyView, own_503=True
        ),
        "/metrics": {
            "get": operation(
                "getMetrics", "Prometheus metrics.", {"200": answer("Text.", {"text/plain": text()})}
            )
        },
        "/openapi.json": {
            "get": operation(
                "getDocument",
                "This document.",
                {"200": answer("It.", {"application/json": {"schema": {"type": "object"}}})},
            )
        },
    }


def _fleet() -> Json:
    told = answer(
        "Every live instance and their sums; null is unknown. In the stream, the data of each event `fleet`, where "
        "what is null is left out.",
        {"application/json": ref(FleetView), "text/event-stream": ref(FleetView)},
    )
    summary = (
        "What the fleet is doing; a live stream of it where the Accept header asks for text/event-stream."
    )
    return {"get": operation("getFleet", summary, {"200": told}, 401, 429)}


def _job_paths(pictures: Json) -> Json:
    job = {"name": "job_id", "in": "path", "required": True, "schema": {"type": "string"}}
    index = {"name": "index", "in": "query", "schema": {"type": "integer", "minimum": 0, "default": 0}}
    last = {"name": "Last-Event-ID", "in": "header", "schema": {"type": "integer"}}
    status = {"application/json": ref(JobView)}
    accepted = {"202": answer("Accepted; Location names the job.", status)}
    cancelled = {
        "202": answer("It ends at its next step.", status),
        "200": answer("It had ended before and stays as it is.", status),
    }
    followed = {
        "200": answer("Until the job ends.", {"text/event-stream": _stream()}),
        "204": {"description": "Nothing left to tell."},
    }
    fetched = {"200": answer("The picture.", pictures), "304": {"description": "If-None-Match named it."}}
    return {
        "/v1/jobs": form("createJob", "Submit an edit and do not wait.", JobForm, accepted, keyed=True),
        "/v1/jobs/{job_id}": {
            "parameters": [job],
            "get": operation("getJob", "How far a job is.", {"200": answer("Its status.", status)}, 401, 404),
            "delete": operation("cancelJob", "Cancel a job.", cancelled, 401, 403, 404),
        },
        "/v1/jobs/{job_id}/events": {
            "parameters": [job, last],
            "get": operation(
                "followJob", "A job's events, all or after Last-Event-ID.", followed, 400, 401, 404, 429, 503
            ),
        },
        "/v1/jobs/{job_id}/image": {
            "parameters": [job, index],
            "get": operation(
                "getImage", "One picture; its ETag is its sha-256.", fetched, 400, 401, 404, 409, 410, 503
            ),
        },
    }


def _template_paths() -> Json:
    name = {"name": "template_id", "in": "path", "required": True, "schema": {"type": "string"}}
    wait = {
        "name": "wait_ms",
        "in": "query",
        "description": "Answer once it is recorded or could not be, at the latest after so many milliseconds.",
        "schema": {"type": "integer", "minimum": 0, "maximum": MAX_WAIT_MS, "default": 0},
    }
    number = {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": DEFAULT_PAGE}
    limit = {"name": "limit", "in": "query", "schema": number}
    after = {"name": "after", "in": "query", "schema": {"type": "string"}}
    told = {"application/json": ref(TemplateView)}
    gone = {"200": answer("Forgotten.", {"application/json": ref(TemplateDeleted)})}
    page = {"200": answer("The newest first.", {"application/json": ref(TemplateList)})}
    state = {"200": answer("Its state.", told)}
    registered = answer("A worker records it; Location names it.", told)
    listed = operation("listTemplates", "The tenant's templates.", page, 400, 401, 503)
    return {
        "/v1/templates": {
            **form(
                "registerTemplate",
                "Register a picture for its edits.",
                TemplateForm,
                {"202": registered},
                keyed=False,
            ),
            "get": {**listed, "parameters": [limit, after]},
        },
        "/v1/templates/{template_id}": {
            "parameters": [name],
            "get": {
                **operation("getTemplate", "How far a template is.", state, 400, 401, 404, 429, 503),
                "parameters": [wait],
            },
            "delete": operation("deleteTemplate", "Forget a template.", gone, 401, 403, 404, 503),
        },
    }


def _stream() -> Json:
    events = [ref(kind)["schema"] for kind in (ProgressEvent, PartialImageEvent, CompletedEvent, ErrorEvent)]
    return {"schema": {"description": "`data` of each event", "oneOf": events}}
