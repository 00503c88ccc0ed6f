"""Tenants, their API keys, and which pages may call the gateway from a browser. Pure."""

from __future__ import annotations

import base64
import hmac
import ipaddress
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from giornata.api_keys import KeysFile, TenantLimits, hash_of
from giornata.wire import subjects
from giornata.wire.errors import CrossSite, Unauthorized


@dataclass(frozen=True)
class Tenant:
    """The owner of a request, and what it may do at this gateway."""

    name: str
    in_progress: int = 0
    """Pictures in progress at a time; 0: no limit of its own."""
    per_minute: int = 0
    """Pictures asked for in a minute; 0: no limit."""
    weight: float = 1.0
    """Share beside other tenants."""
    operator: bool = False
    """An operator sees hosts, instances and the load of others."""
    inbox: str = subjects.INBOX
    """Prefix of the subjects to which answers over NATS may go: the asking application's."""


def tenant_of(key: str | None, file: KeysFile | None, defaults: Tenant) -> Tenant:
    """The tenant that `key` stands for; its hash is compared with every known one, each in constant time.

    Args:
        key: as the request brings it; Unauthorized where keys are asked for and it is none of them.
        file: the known keys; None where no key is asked for.
        defaults: the tenant of a gateway without keys, and the limits of a tenant without limits of its own.
    """
    if file is None:
        return replace(defaults, operator=True)
    if key is None:
        raise Unauthorized(
            "An API key is needed.", accepted="the header Authorization: Bearer KEY, or api_key over NATS"
        )
    given = hash_of(key)
    found = [known for known in file.keys if hmac.compare_digest(known.sha256, given)]
    if not found:
        raise Unauthorized
    name, inbox = found[-1].tenant, found[-1].inbox
    limits = file.tenants.get(name, TenantLimits())
    return replace(defaults, name=name, inbox=inbox, **limits.model_dump(exclude_none=True))


def check_site(site: str | None, origin: str | None, own: Collection[str], *, keyed: bool) -> None:
    """Raise CrossSite for a page of another web site: any page can have its visitor's browser send a form here.

    `site` is the ``Sec-Fetch-Site`` header, which browsers set and pages cannot; over plain HTTP they send ``Origin``
    alone, which is compared with the gateway's `own` hosts. Other clients send neither. A `keyed` gateway asks for an
    API key, which the page would not know.
    """
    foreign = site is None and origin is not None and (origin.partition("://")[2] or origin) not in own
    if not keyed and (foreign or site == "cross-site"):
        raise CrossSite(
            received=f"Origin: {origin}" if foreign else f"Sec-Fetch-Site: {site}",
            accepted="requests from pages of the gateway's own site, from programs, or to a gateway with API keys",
        )


def bearer(authorization: str | None) -> str | None:
    """The token of an ``Authorization: Bearer`` header."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def password(authorization: str | None) -> str | None:
    """The password of an ``Authorization: Basic`` header (RFC 7617); the user's name may be any."""
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        _, _, word = base64.b64decode(token, validate=True).decode().partition(":")
    except ValueError:
        return None
    return word or None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`; a name other than localhost may lead anywhere."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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
    """Return whether a page of `origin` may call, where `origins` are configured; None is no page of another origin."""
    return origin is not None and not {origin, "*"}.isdisjoint(origins_in(origins))


def headers(origin: str, asked: str | None = None) -> dict[str, str]:
    """Return what lets a page of `origin` read an answer, and send a request that has the headers `asked`."""
    read = {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": EXPOSED}
    if asked is None:
        return read
    methods = {
        "Access-Control-Allow-Methods": "GET, HEAD, POST, PUT, DELETE",
        "Access-Control-Max-Age": "600",
    }
    return read | methods | {"Access-Control-Allow-Headers": asked}
