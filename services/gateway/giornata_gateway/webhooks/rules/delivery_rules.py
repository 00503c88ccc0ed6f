"""Rules of delivery: how a webhook is signed, and when it is sent, sent again and given up. Pure."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from giornata.wire.templates import WebhookRecord, WebhookState

# Signatures of webhooks as Standard Webhooks has them (standardwebhooks.com, version 1.0.0).


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


# When a webhook is sent, sent again, and given up.


FACTOR: Final = 4.0
LONGEST_S: Final = 6 * 3600.0
AT_ONCE: Final = 32
"""Webhooks that a gateway sends at a time."""
AT_ONCE_OF_TENANT: Final = 4
"""Webhooks of one tenant among them, so that its slow receivers hold up no other tenant's."""
CLAIM_S: Final = 60.0
"""For so long a webhook belongs to the gateway that sends it, longer than an attempt may take."""
GONE: Final = 410
"""The status by which a receiver wants no more of it."""
ERROR_CHARACTERS: Final = 200


class DeliveryOutcome(StrEnum):
    """The outcome of an attempt to deliver a webhook."""

    TAKEN = "taken"
    FAILED = "failed"
    """It is sent again."""
    GIVEN_UP = "given_up"


@dataclass(frozen=True)
class WebhookRetryPolicy:
    """A policy of how often a webhook is sent again."""

    attempts: int
    first_s: float
    """After the first failure; each following pause is four times as long, six hours at most."""

    def pause_s(self, attempts: int) -> float:
        """Before the next attempt, after so many."""
        return min(LONGEST_S, self.first_s * FACTOR ** min(attempts - 1, 20))


def claimed(hook: WebhookRecord, body: str | None, now_s: float) -> WebhookRecord | None:
    """The record while a gateway sends it; None where it is not to be sent now: another one does, or has."""
    if hook.state is not WebhookState.WAITING or hook.next_s > now_s:
        return None
    return hook.model_copy(update={"body": hook.body or body, "next_s": now_s + CLAIM_S})


def failed(
    hook: WebhookRecord, why: str, status: int | None, now_s: float, patience: WebhookRetryPolicy
) -> WebhookRecord:
    """The record after an attempt failed, with its receiver's answer `status` if there was one."""
    attempts = hook.attempts + 1
    over = attempts >= patience.attempts or status == GONE
    return hook.model_copy(
        update={
            "attempts": attempts,
            "error": why[:ERROR_CHARACTERS],
            "state": WebhookState.DEAD if over else WebhookState.WAITING,
            "next_s": now_s + patience.pause_s(attempts),
        }
    )


def revived(hook: WebhookRecord) -> WebhookRecord:
    """The record of a webhook that is sent again, as often as a new one."""
    return hook.model_copy(update={"state": WebhookState.WAITING, "attempts": 0, "next_s": 0.0})


def chosen(
    hooks: Mapping[str, WebhookRecord], looks_s: Mapping[str, float], busy: Collection[str], now_s: float
) -> tuple[list[str], float | None]:
    """Return which of `hooks`, by key, are sent now, and the time at which the next one is due.

    `looks_s` says before when a job that has not ended is not looked at. `busy` are being sent.
    """
    due: list[tuple[float, str]] = []
    next_s = None
    for key, hook in hooks.items():
        if hook.state is WebhookState.WAITING and key not in busy:
            at_s = max(hook.next_s, looks_s.get(key, 0.0))
            if at_s <= now_s:
                due.append((at_s, key))
            elif next_s is None or at_s < next_s:
                next_s = at_s
    tenants = Counter(hooks[key].tenant for key in busy if key in hooks)
    found: list[str] = []
    for _, key in sorted(due):
        tenant = hooks[key].tenant
        if len(busy) + len(found) < AT_ONCE and tenants[tenant] < AT_ONCE_OF_TENANT:
            found.append(key)
            tenants[tenant] += 1
    return found, next_s
