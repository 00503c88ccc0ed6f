"""Signatures of webhooks, judged by the published library as a receiver uses it, under attack."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
import time_machine
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook, WebhookVerificationError

from giornata_gateway.webhooks.rules.signing import LEAST_BYTES, headers, secret_of

MASTER, EARLIER = b"m" * LEAST_BYTES, b"e" * LEAST_BYTES
ALICES, MALLORYS = secret_of(MASTER, "alice"), secret_of(MASTER, "mallory")
NOW = datetime(2026, 11, 25, 12, tzinfo=UTC)
BODY = json.dumps({"type": "job.completed", "data": {"id": "job_1"}})


def told(
    *secrets: str, message_id: str = "msg_job_1", at: datetime = NOW, body: str = BODY
) -> dict[str, str]:
    return headers(secrets, message_id, int(at.timestamp()), body)


def takes(given: dict[str, str], body: str = BODY, secret: str = ALICES, at: datetime = NOW) -> bool:
    with time_machine.travel(at, tick=False):
        try:
            Webhook(secret).verify(body, given)
        except WebhookVerificationError:
            return False
    return True


def test_a_receiver_takes_what_its_tenants_secret_has_signed() -> None:
    assert takes(told(ALICES))
    assert not takes(told(MALLORYS)), "a webhook that another tenant has sent to this address"
    assert not takes(told(ALICES), secret=MALLORYS)


@pytest.mark.parametrize("late", [timedelta(minutes=6), timedelta(days=1), -timedelta(minutes=6)])
def test_what_was_heard_is_not_taken_again_later(late: timedelta) -> None:
    heard = told(ALICES)
    assert not takes(heard, at=NOW + late)
    now = {"webhook-timestamp": str(int((NOW + late).timestamp()))}
    assert not takes(heard | now, at=NOW + late), "the time is signed"


def test_a_signature_is_of_one_message_and_one_body() -> None:
    heard, other = told(ALICES), told(ALICES, message_id="msg_job_2", body=BODY.replace("job_1", "job_2"))
    assert not takes(heard | {"webhook-id": other["webhook-id"]})
    assert not takes(heard, body=BODY.replace("completed", "failed"))
    assert not takes(other, body=BODY)


def test_while_a_secret_is_changed_receivers_with_either_take_it() -> None:
    both = told(ALICES, secret_of(EARLIER, "alice"))
    assert takes(both)
    assert takes(both, secret=secret_of(EARLIER, "alice"))
    assert not takes(both, secret=secret_of(EARLIER, "mallory"))


@given(
    st.lists(
        st.tuples(st.binary(min_size=LEAST_BYTES, max_size=LEAST_BYTES), st.text()),
        min_size=2,
        max_size=2,
        unique=True,
    )
)
def test_no_two_tenants_and_no_two_deployments_share_a_secret(pairs: list[tuple[bytes, str]]) -> None:
    """Masters of one length: HMAC fills a shorter key with zeros."""
    one, other = (secret_of(master, tenant) for master, tenant in pairs)
    assert one != other
