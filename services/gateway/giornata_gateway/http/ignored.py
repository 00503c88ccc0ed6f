"""Fields that a request names and that change nothing here: its answer tells them in a header, and so does the log."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from urllib.parse import quote

import structlog
from aiohttp import web

log = structlog.get_logger(__name__)

HEADER: Final = "X-Giornata-Ignored"
TOLD: Final = 40
"""Most fields that the header names."""
NAME_CHARACTERS: Final = 64
IGNORED: Final[web.RequestKey[Iterable[str]]] = web.RequestKey("ignored", tuple)
"""The fields that :func:`ignore` was told of, each once, in the order of the request."""


def ignore(request: web.Request, fields: Iterable[str]) -> None:
    """Have the answer of `request` tell that these `fields` had no effect; a second call adds to the first."""
    before = request.get(IGNORED, ())
    request[IGNORED] = tuple(dict.fromkeys((*before, *fields)))
    if request[IGNORED] != before:
        log.info("fields_ignored", path=request.path, fields=header_value(request[IGNORED]))


def header_value(fields: Iterable[str]) -> str:
    """The names with commas between them, each in ASCII without a comma, whatever a client has called its fields."""
    names = list(fields)
    told = [quote(name.encode("utf-8", "replace")[:NAME_CHARACTERS], safe="[]:/ ") for name in names[:TOLD]]
    return ", ".join([*told, *([f"and {len(names) - TOLD} more"] if len(names) > TOLD else [])])
