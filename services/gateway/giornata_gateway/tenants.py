"""Who is asking: API keys and the tenants they stand for; pages of other web sites. Pure."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Final

from giornata.errors import CrossSite, Unauthorized

DEFAULT_TENANT: Final = "default"
"""Owner of every job where no API keys are configured."""


def tenant_of(key: str | None, keys: Mapping[str, str]) -> str:
    """The tenant that `key` stands for; every configured key is compared, in constant time.

    Raises:
        Unauthorized: keys are configured and `key` is none of them.
    """
    if not keys:
        return DEFAULT_TENANT
    if key is None:
        raise Unauthorized(
            "An API key is needed.", accepted="the header Authorization: Bearer KEY, or api_key over NATS"
        )
    found: str | None = None
    given = key.encode(errors="surrogateescape")  # a header need not be UTF-8
    for known, tenant in keys.items():
        if hmac.compare_digest(known.encode(), given):
            found = tenant
    if found is None:
        raise Unauthorized
    return found


def check_site(site: str | None, keys: Mapping[str, str]) -> None:
    """A page of any web site can have its visitor's browser send a form to this machine; a key it does not know.

    Args:
        site: the ``Sec-Fetch-Site`` header, which browsers set and pages cannot; other clients send none.
        keys: the configured ones.

    Raises:
        CrossSite: no keys are configured and the page is one of another site.
    """
    if not keys and site == "cross-site":
        raise CrossSite(
            received=f"Sec-Fetch-Site: {site}",
            accepted="requests from pages of the gateway's own site, from programs, or to a gateway with API keys",
        )


def bearer(authorization: str | None) -> str | None:
    """The token of an ``Authorization: Bearer`` header."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None
