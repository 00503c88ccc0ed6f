"""Who is asking: API keys and the tenants they stand for. Pure."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Final

from giornata.errors import Unauthorized

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


def bearer(authorization: str | None) -> str | None:
    """The token of an ``Authorization: Bearer`` header."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None
