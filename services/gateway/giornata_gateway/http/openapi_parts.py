"""What operations of the OpenAPI document are made of. Pure."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel

from giornata.wire.errors import BY_CODE, IdempotencyKeyReused, ResultExpired
from giornata_gateway.intake.rules.idempotency import MAX_CHARACTERS
from giornata_gateway.views.answers import ErrorAnswer

Json = dict[str, Any]

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
    "name": "Idempotency-Key",
    "in": "header",
    "description": "The same key with the same edit is one job, however often it is asked for.",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_CHARACTERS, "pattern": "^[ -~]+$"},
}


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


def form(name: str, summary: str, form: type[BaseModel], answers: Json, *, keyed: bool) -> Json:
    """A POST of a multipart form by which pictures are asked for.

    Args:
        name: of the operation.
        summary: of what it does.
        form: the fields.
        answers: of a success, by status.
        keyed: whether it takes an idempotency key.
    """
    body = {"required": True, "content": {"multipart/form-data": ref(form)}}
    never = {500} if keyed else {500, IdempotencyKeyReused.status, ResultExpired.status}
    statuses = sorted({kind.status for kind in BY_CODE.values()} - never)
    headers = RATE_LIMIT | (REPLAYED if keyed else {})
    told = {status: {**answer, "headers": headers} for status, answer in answers.items()}
    post = {**operation(name, summary, told, *statuses), "requestBody": body}
    post["responses"]["429"]["headers"] = RETRY_AFTER | RATE_LIMIT
    return {"post": post | ({"parameters": [KEY]} if keyed else {})}


def get(name: str, summary: str, view: type[BaseModel], *errors: int, own_503: bool = False) -> Json:
    """A GET without parameters."""
    content = {"application/json": ref(view)}
    answers = {"200": answer(summary, content)}
    if own_503:
        answers["503"] = {**answer(summary, content), "headers": RETRY_AFTER}
    return {"get": operation(name, summary, answers, *errors)}
