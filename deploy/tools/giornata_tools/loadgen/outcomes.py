"""What became of requests, and how a server's answer is judged. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from giornata_tools.loadgen.workload import Request

NOT_SENT: Final = "too_many_in_flight"
"""Code of a request that was due while as many as allowed had no answer."""
NOT_CONNECTED: Final = "not_connected"
CONNECTION_LOST: Final = "connection_lost"
TIMEOUT: Final = "timeout"
NO_PICTURES: Final = "not_an_image_answer"
"""Code of a success that is not of the image API's form."""
PICTURES_MISSING: Final = "pictures_missing"
"""Code of a success with fewer pictures than asked for, where the server does not say why."""

_CODE: Final = re.compile(r"[A-Za-z][\w.-]{0,63}")
SAID: Final = 500
"""Characters of a server's message that are kept."""


@dataclass(frozen=True)
class ServerAnswer:
    """What a server answered."""

    pictures: int = 0
    code: str | None = None
    """Stable; None for a success."""
    message: str = ""
    """Why, where there is a code."""


@dataclass(frozen=True)
class Outcome:
    """What became of one request; times in seconds from the start of the run."""

    request: Request
    ended_s: float
    """When the whole answer had come; of one that was not sent, when it was due."""
    answer: ServerAnswer
    sent_s: float | None = None
    """When it left; None: it was not sent."""
    in_flight: int = 0
    """Requests without an answer when it left, itself included."""

    @property
    def latency_s(self) -> float:
        """Seconds from when it was due until its answer had come: a late generator does not flatter the server."""
        return self.ended_s - self.request.at_s

    @property
    def late_s(self) -> float:
        """How much later than due it left; 0 where it was not sent."""
        return 0.0 if self.sent_s is None else self.sent_s - self.request.at_s


def judged(status: int, body: bytes, n: int) -> ServerAnswer:
    """A server's answer to a request for `n` pictures, in the form of OpenAI's image API.

    Args:
        status: of HTTP.
        body: JSON with ``data``, or with ``error``.
        n: pictures asked for.
    """
    told = _object(body)
    if not 200 <= status < 300:
        code, message = _error(told.get("error"), f"http_{status}")
        return ServerAnswer(0, code, message or body[:SAID].decode("utf-8", "replace"))
    data = told.get("data")
    if not isinstance(data, list) or not data or not all(map(_is_picture, data)):
        return ServerAnswer(0, NO_PICTURES, body[:SAID].decode("utf-8", "replace"))
    if len(data) >= n:
        return ServerAnswer(len(data))
    extension = told.get("giornata")
    errors = extension.get("errors") if isinstance(extension, dict) else None
    first = (
        errors[0].get("error")
        if isinstance(errors, list) and errors and isinstance(errors[0], dict)
        else None
    )
    code, message = _error(first, PICTURES_MISSING)
    return ServerAnswer(len(data), code, message or f"{len(data)} of {n} pictures came")


def _object(body: bytes) -> dict[str, Any]:
    try:
        told = json.loads(body)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _is_picture(item: object) -> bool:
    return isinstance(item, dict) and any(isinstance(item.get(name), str) for name in ("b64_json", "url"))


def _error(error: object, default: str) -> tuple[str, str]:
    """Code and message of an error object; a code that is not a word becomes `default`."""
    if not isinstance(error, dict):
        return default, ""
    code, message = error.get("code"), error.get("message")
    known = isinstance(code, str) and _CODE.fullmatch(code) is not None
    return str(code) if known else default, str(message)[:SAID] if message else ""
