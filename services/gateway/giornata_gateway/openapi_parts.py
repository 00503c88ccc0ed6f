"""What operations of the OpenAPI document are made of. Pure."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel

from giornata.errors import BY_CODE
from giornata_gateway.answers import ErrorAnswer

Json = dict[str, Any]

RETRY_AFTER: Final = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}}


def text() -> Json:
    """A body of text."""
    return {"schema": {"type": "string"}}


def ref(model: type[BaseModel]) -> Json:
    """A body of a named schema."""
    return {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}


def answer(description: str, content: Json) -> Json:
    """A response."""
    return {"description": description, "content": content}


def error(status: int) -> Json:
    """The response of an HTTP status: which codes it has."""
    codes = sorted(code for code, kind in BY_CODE.items() if kind.status == status)
    told = answer(", ".join(f"`{code}`" for code in codes), {"application/json": ref(ErrorAnswer)})
    if status in {429, 503}:
        told["headers"] = RETRY_AFTER
    return told


def operation(name: str, summary: str, answers: Json, *errors: int) -> Json:
    """An operation, with the responses of its errors."""
    responses = {**answers, **{str(status): error(status) for status in (*errors, 500)}}
    return {"operationId": name, "summary": summary, "responses": responses}


def form(name: str, summary: str, form: type[BaseModel], answers: Json) -> Json:
    """A POST of a multipart form."""
    body = {"required": True, "content": {"multipart/form-data": ref(form)}}
    statuses = sorted({kind.status for kind in BY_CODE.values()} - {500, 410})
    return {"post": {**operation(name, summary, answers, *statuses), "requestBody": body}}


def get(name: str, summary: str, view: type[BaseModel], *errors: int, own_503: bool = False) -> Json:
    """A GET without parameters."""
    content = {"application/json": ref(view)}
    answers = {"200": answer(summary, content)}
    if own_503:
        answers["503"] = {**answer(summary, content), "headers": RETRY_AFTER}
    return {"get": operation(name, summary, answers, *errors)}
