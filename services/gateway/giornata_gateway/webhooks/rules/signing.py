"""Signatures of webhooks as Standard Webhooks has them (standardwebhooks.com, version 1.0.0)."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Sequence
from typing import Final

PREFIX: Final = "whsec_"
LEAST_BYTES: Final = 24
"""Least length of the secret from which all tenants' secrets are made."""


def secret_of(master: bytes, tenant: str) -> str:
    """The secret of a tenant, as its receivers are told it; no secret gives another one away."""
    derived = hmac.digest(master, b"giornata webhook\0" + tenant.encode(), hashlib.sha256)
    return PREFIX + base64.b64encode(derived).decode()


def headers(secrets: Sequence[str], message_id: str, timestamp_s: int, body: str) -> dict[str, str]:
    """The headers of an attempt, with a signature by each secret: receivers accept any that they know."""
    signed = f"{message_id}.{timestamp_s}.{body}".encode()
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": " ".join(f"v1,{_signature(secret, signed)}" for secret in secrets),
    }


def _signature(secret: str, signed: bytes) -> str:
    key = base64.b64decode(secret.removeprefix(PREFIX))
    return base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
