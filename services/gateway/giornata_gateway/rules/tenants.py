"""Tenants and their API keys, pages that may call from a browser, and addresses that webhooks may go to. Pure."""

from __future__ import annotations

import base64
import hmac
import ipaddress
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

from giornata.api_keys import KeysFile, TenantLimits, hash_of
from giornata.wire import subjects
from giornata.wire.errors import CrossSite, InvalidField, Unauthorized


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


Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

MAX_URL: Final = 2000
WEBHOOK: Final = "webhook"
NOT_SENT: Final = "A webhook cannot be sent there."
_TRANSLATED: Final = ipaddress.ip_network("64:ff9b::/96")
"""NAT64: the last 32 bits are an IPv4 address."""
_UNICAST: Final = ipaddress.ip_network("2000::/3")
"""All of IPv6 that is given out as public. What lies beside it may carry an IPv4 address, or be a site's own."""
_ASSIGNED: Final = ipaddress.ip_network("192.0.0.0/24")
"""For protocols; Python takes part of it for public."""
_HOST: Final = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]+)?")
PORTS: Final = {"https": 443, "http": 80}


def networks_in(text: str) -> tuple[Network, ...]:
    """The networks that are named in `text`, with commas between them; ValueError names one that is none."""
    return tuple(ipaddress.ip_network(part.strip()) for part in text.split(",") if part.strip())


def hosts_in(text: str) -> frozenset[str]:
    """The hosts that are named in `text`, with commas between them; ValueError tells one that is none."""
    hosts = frozenset(part.strip().lower() for part in text.split(",") if part.strip())
    for host in sorted(hosts):
        if not _HOST.fullmatch(host):
            raise ValueError(f"a host is HOST or HOST:PORT, an IPv6 address in brackets, and not {host!r}")
    return hosts


def names_of(url: str) -> set[str]:
    """Return what :func:`hosts_in` may call the host of `url`: HOST:PORT, and at its scheme's own port HOST."""
    try:
        parts = urlsplit(url)
        usual, name = PORTS.get(parts.scheme), parts.hostname or ""
        port = parts.port or usual
    except ValueError:
        return set()
    name = f"[{name}]" if ":" in name else name
    return {f"{name}:{port}", name} if port == usual else {f"{name}:{port}"}


def check_url(url: str, networks: Sequence[Network], field: str = WEBHOOK, why: str = NOT_SENT) -> str:
    """`url` if it may be connected to, as far as its text tells; InvalidField otherwise.

    Plain HTTP is for the networks that the operator allows. Addresses of names are looked at when a connection is made.
    """
    within = ", or http:// within the networks that are allowed" if networks else ""
    accepted = f"https://HOST/PATH at a public address{within}"
    refusal = InvalidField(why, field=field, received=url, accepted=accepted)
    plain = url.isascii() and url.isprintable() and " " not in url and len(url) <= MAX_URL
    if not plain:
        raise refusal
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise refusal from None
    schemes = {"https", "http"} if networks else {"https"}
    if parts.scheme not in schemes or not host or port == 0 or "@" in parts.netloc or parts.fragment:
        raise refusal
    try:
        literal = ipaddress.ip_address(host)
    except ValueError:
        return url
    if not may_connect(literal, networks, plain=parts.scheme == "http"):
        raise refusal
    return url


def may_connect(address: Address, networks: Sequence[Network], *, plain: bool) -> bool:
    """Return whether `address` may be connected to: within `networks`, or, unless it is `plain` HTTP, a public one."""
    inner = _inner(address)
    if any(one.version == inner.version and inner in one for one in networks):
        return True
    if plain:
        return False
    if isinstance(inner, ipaddress.IPv4Address):
        return inner.is_global and not inner.is_multicast and inner not in _ASSIGNED
    return inner.is_global and inner in _UNICAST


def _inner(address: Address) -> Address:
    """The IPv4 address that an IPv6 address stands for, where it does."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _TRANSLATED:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address
