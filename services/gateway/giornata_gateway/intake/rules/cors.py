"""Which pages of other origins may call the gateway from a browser (the Fetch Standard's CORS). Pure."""

from __future__ import annotations

import re
from typing import Final

_ORIGIN: Final = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s,@?#*]+")
EXPOSED: Final = (
    "X-Request-Id, X-Giornata-Job, X-Giornata-Ignored, Location, ETag, Retry-After, RateLimit, RateLimit-Policy, "
    "Idempotent-Replayed"
)
"""Headers of answers that pages may read."""
MAX_AGE_S: Final = 600


def origins_in(text: str) -> frozenset[str]:
    """The origins that are named in `text`, with commas between them."""
    return frozenset(part.strip() for part in text.split(",") if part.strip())


def check_origins(text: str) -> str:
    """`text`, if it names origins; ValueError tells one that is none."""
    for origin in sorted(origins_in(text)):
        if not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"an origin is SCHEME://HOST or SCHEME://HOST:PORT without a path, or *, and not {origin!r}"
            )
    return text


def allowed(origin: str | None, origins: frozenset[str]) -> bool:
    """Whether a page of `origin` may call; None is no page of another origin."""
    return origin is not None and (origin in origins or "*" in origins)


def answer_headers(origin: str) -> dict[str, str]:
    """Headers by which a browser lets a page of `origin` read an answer."""
    return {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": EXPOSED, "Vary": "Origin"}


def preflight_headers(origin: str, asked: str) -> dict[str, str]:
    """Headers by which a browser lets a page of `origin` send a request; `asked` are the headers that it has."""
    return answer_headers(origin) | {
        "Access-Control-Allow-Methods": "GET, HEAD, POST, PUT, DELETE",
        "Access-Control-Allow-Headers": asked or "*",
        "Access-Control-Max-Age": str(MAX_AGE_S),
    }
