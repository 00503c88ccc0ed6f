"""Who is asking: API keys and the tenants they stand for; pages of other web sites; other machines. Pure."""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass
from typing import Final

from giornata.api_keys import KeysFile, TenantLimits, hash_of
from giornata.wire.errors import CrossSite, Unauthorized

DEFAULT_TENANT: Final = "default"
"""Owner of every job where no API keys are asked for."""


@dataclass(frozen=True)
class Tenant:
    """Whose request it is, and what they may do at this gateway."""

    name: str
    in_progress: int = 0
    """Pictures in progress at a time; 0: no limit of their own."""
    per_minute: int = 0
    """Pictures asked for in a minute; 0: no limit."""
    weight: float = 1.0
    """Share beside other tenants."""


def tenant_of(key: str | None, file: KeysFile | None, defaults: Tenant) -> Tenant:
    """The tenant that `key` stands for; its hash is compared with every known one, each in constant time.

    Args:
        key: as the request brings it.
        file: the known keys; None where nobody is asked for one.
        defaults: the tenant of a gateway without keys, and the limits of those that have none of their own.

    Raises:
        Unauthorized: keys are asked for and `key` is none of them.
    """
    if file is None:
        return defaults
    if key is None:
        raise Unauthorized(
            "An API key is needed.", accepted="the header Authorization: Bearer KEY, or api_key over NATS"
        )
    found: str | None = None
    given = hash_of(key)
    for known in file.keys:
        if hmac.compare_digest(known.sha256, given):
            found = known.tenant
    if found is None:
        raise Unauthorized
    limits = file.tenants.get(found, TenantLimits())
    return Tenant(
        name=found,
        in_progress=defaults.in_progress if limits.in_progress is None else limits.in_progress,
        per_minute=defaults.per_minute if limits.per_minute is None else limits.per_minute,
        weight=defaults.weight if limits.weight is None else limits.weight,
    )


def check_site(site: str | None, *, keyed: bool) -> None:
    """A page of any web site can have its visitor's browser send a form to this machine; a key it does not know.

    Args:
        site: the ``Sec-Fetch-Site`` header, which browsers set and pages cannot; other clients send none.
        keyed: whether this gateway asks for API keys.

    Raises:
        CrossSite: it does not, and the page is one of another site.
    """
    if not keyed and site == "cross-site":
        raise CrossSite(
            received=f"Sec-Fetch-Site: {site}",
            accepted="requests from pages of the gateway's own site, from programs, or to a gateway with API keys",
        )


def bearer(authorization: str | None) -> str | None:
    """The token of an ``Authorization: Bearer`` header."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`; a name other than localhost may lead anywhere."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
