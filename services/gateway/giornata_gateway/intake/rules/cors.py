"""Which pages of other origins may call the gateway from a browser (the Fetch Standard's CORS). Pure."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

_ORIGIN: Final = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s,@?#*]+")
EXPOSED: Final = (
    "X-Request-Id, X-Giornata-Job, X-Giornata-Ignored, Location, Retry-After, RateLimit, RateLimit-Policy"
)
"""Headers of answers that pages may read."""


@lru_cache(maxsize=8)  # each request asks with the same text
def origins_in(text: str) -> frozenset[str]:
    """The origins that are named in `text`, with commas between them; ValueError tells one that is none."""
    origins = frozenset(part.strip() for part in text.split(",") if part.strip())
    for origin in sorted(origins):
        if not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"an origin is SCHEME://HOST or SCHEME://HOST:PORT without a path, or *, and not {origin!r}"
            )
    return origins


def is_allowed(origin: str | None, origins: str) -> bool:
    """Whether a page of `origin` may call, where `origins` are configured; None is no page of another origin."""
    return origin is not None and not {origin, "*"}.isdisjoint(origins_in(origins))


def headers(origin: str, asked: str | None = None) -> dict[str, str]:
    """What lets a page of `origin` read an answer, and send a request that has the headers `asked`."""
    read = {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": EXPOSED}
    if asked is None:
        return read
    methods = {
        "Access-Control-Allow-Methods": "GET, HEAD, POST, PUT, DELETE",
        "Access-Control-Max-Age": "600",
    }
    return read | methods | {"Access-Control-Allow-Headers": asked}
