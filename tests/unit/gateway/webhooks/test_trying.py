"""When webhooks are sent, sent again, and given up; and whose turn it is."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook

from giornata.wire.errors import ServiceUnavailable
from giornata.wire.webhooks import WebhookRecord, WebhookState
from giornata_gateway.webhooks.rules import signing
from giornata_gateway.webhooks.rules.trying import (
    AT_ONCE,
    AT_ONCE_OF_TENANT,
    CLAIM_S,
    GONE,
    LONGEST_S,
    WebhookRetryPolicy,
    chosen,
    claimed,
    failed,
    revived,
)
from giornata_gateway.webhooks.secret_file import read_secrets
from giornata_gateway.webhooks.sending import ATTEMPT_S

PATIENCE = WebhookRetryPolicy(attempts=3, first_s=5.0)


def hook(name: str = "job", tenant: str = "alice", **fields: object) -> WebhookRecord:
    made = WebhookRecord(job_id=name, tenant=tenant, url="https://example.org/", created_s=0)
    return made.model_copy(update=fields)


def test_one_gateway_claims_it_for_longer_than_an_attempt_takes() -> None:
    first = claimed(hook(), "told", 100.0)
    assert first is not None
    assert first.body == "told"
    assert claimed(first, "told", 100.0 + ATTEMPT_S) is None
    assert CLAIM_S > 2 * ATTEMPT_S
    again = claimed(first, "other", 100.0 + CLAIM_S)
    assert again is not None
    assert again.body == "told", "every attempt tells the same"
    assert claimed(hook(state=WebhookState.DEAD), "told", 100.0) is None


def test_pauses_grow_and_the_last_failure_gives_it_up() -> None:
    now = hook(body="told")
    pauses = []
    for _ in range(PATIENCE.attempts):
        assert now.state is WebhookState.WAITING
        now = failed(now, "status 500", 500, 100.0, PATIENCE)
        pauses.append(now.next_s - 100.0)
    assert (now.state, now.attempts, pauses) == (WebhookState.DEAD, 3, [5.0, 20.0, 80.0])
    assert WebhookRetryPolicy(20, 3600.0).pause_s(20) == LONGEST_S
    again = revived(now)
    assert (again.state, again.attempts, again.body) == (WebhookState.WAITING, 0, "told")


def test_a_receiver_that_wants_no_more_gives_it_up() -> None:
    assert failed(hook(), "status 410", GONE, 0.0, PATIENCE).state is WebhookState.DEAD


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 20), st.booleans(), st.booleans()), max_size=60),
    st.floats(0, 20),
)
def test_what_is_due_is_sent_within_the_limits_and_nothing_due_is_slept_over(
    given_hooks: list[tuple[str, float, bool, bool]], now_s: float
) -> None:
    hooks = {
        str(i): hook(str(i), tenant, next_s=at, state=WebhookState.DEAD if dead else WebhookState.WAITING)
        for i, (tenant, at, dead, _) in enumerate(given_hooks)
    }
    busy = {str(i) for i, (_, _, dead, sent) in enumerate(given_hooks) if sent and not dead}
    found, next_s = chosen(hooks, {}, busy, now_s)
    assert all(hooks[key].state is WebhookState.WAITING and hooks[key].next_s <= now_s for key in found)
    assert not busy & set(found)
    assert len(found) <= max(0, AT_ONCE - len(busy))
    for tenant in "abc":
        own = [key for key in found if hooks[key].tenant == tenant]
        sent = [key for key in busy if hooks[key].tenant == tenant]
        assert len(own) <= max(0, AT_ONCE_OF_TENANT - len(sent))
    later = [
        one.next_s
        for key, one in hooks.items()
        if key not in busy and one.state is WebhookState.WAITING and one.next_s > now_s
    ]
    assert next_s == min(later, default=None)


def test_a_job_that_was_looked_at_waits_for_its_next_look() -> None:
    assert chosen({"a": hook()}, {"a": 30.0}, (), 10.0) == ([], 30.0)
    assert chosen({"a": hook()}, {}, (), 10.0) == (["a"], None)


@given(st.binary(min_size=24), st.text(st.characters(codec="ascii"), min_size=1), st.text())
def test_signatures_are_those_of_standard_webhooks(master: bytes, message_id: str, body: str) -> None:
    secret, now = signing.secret_of(master, "alice"), datetime(2026, 11, 25, tzinfo=UTC)
    told = signing.headers([secret], message_id, int(now.timestamp()), body)
    assert told["webhook-signature"] == Webhook(secret).sign(message_id, now, body)


def test_an_earlier_secret_signs_too_and_tenants_have_their_own() -> None:
    secrets = [signing.secret_of(master, "alice") for master in (b"new" * 8, b"old" * 8)]
    told = signing.headers(secrets, "msg_1", 1, "{}")["webhook-signature"].split(" ")
    assert told == [signing.headers([one], "msg_1", 1, "{}")["webhook-signature"] for one in secrets]
    assert signing.secret_of(b"new" * 8, "bob") != secrets[0]


def test_the_file_of_secrets(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    assert read_secrets(None) == ()
    path.write_text("n" * 32 + "\n\n" + "o" * 24 + "\n")
    assert read_secrets(path) == (b"n" * 32, b"o" * 24)
    for text in ("", "a-short-secret\n"):
        path.write_text(text)
        with pytest.raises(ServiceUnavailable) as caught:
            read_secrets(path)
        assert "a-short-secret" not in str(caught.value)
    with pytest.raises(ServiceUnavailable, match="cannot be read"):
        read_secrets(tmp_path / "none")
