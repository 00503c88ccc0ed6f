"""The addresses to which webhooks may go: public ones, and networks that the operator allows."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from giornata.wire.errors import InvalidField

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

MAX_URL: Final = 2000
FIELD: Final = "webhook"
REFUSED: Final = "A webhook cannot be sent there."
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


def check_url(url: str, networks: Sequence[Network], field: str = FIELD, why: str = REFUSED) -> str:
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
