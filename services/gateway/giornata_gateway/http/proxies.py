"""How clients reach this gateway, as a proxy in front of it says.

A proxy that is not trusted is a client like any other, and may say what it likes.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from typing import Final, NamedTuple

from aiohttp import web

from giornata_gateway.webhooks.rules.addresses import networks_in

_PROTO: Final = re.compile(r'(?:^|;)\s*proto="?(https?)"?\s*(?:;|$)', re.IGNORECASE)
"""The scheme in one element of the header ``Forwarded`` (RFC 7239)."""
_PREFIX: Final = re.compile(r"(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._~-]+)+")
_networks: Final = lru_cache(networks_in)


class PublicOrigin(NamedTuple):
    """What a trusted proxy says of the request that came to it."""

    scheme: str | None = None
    prefix: str = ""
    """Path below which the proxy serves this gateway: it begins with a slash and ends without one, or is empty."""


def public_origin(request: web.Request, trusted: str) -> PublicOrigin:
    """What the headers say where the address they come from is in one of the networks `trusted`.

    Of several values the last counts, which the nearest proxy has written.
    """
    if not _is_trusted(request.remote, trusted):
        return PublicOrigin()
    scheme, prefix = _last(request, "X-Forwarded-Proto"), _last(request, "X-Forwarded-Prefix").rstrip("/")
    if not scheme and (found := _PROTO.search(_last(request, "Forwarded"))):
        scheme = found[1]
    known = scheme.lower() in {"http", "https"}
    return PublicOrigin(scheme.lower() if known else None, prefix if _PREFIX.fullmatch(prefix) else "")


def _is_trusted(peer: str | None, trusted: str) -> bool:
    try:
        address = ipaddress.ip_address(peer or "")
    except ValueError:
        return False
    inner = getattr(address, "ipv4_mapped", None) or address
    return any(inner in network for network in _networks(trusted))


def _last(request: web.Request, name: str) -> str:
    return ",".join(request.headers.getall(name, ())).rpartition(",")[2].strip()
