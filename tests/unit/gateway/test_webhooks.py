"""Webhooks: when they are sent and given up, how they are signed, where they may go."""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import time_machine
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook, WebhookVerificationError

from giornata.wire.errors import InvalidField, ServiceUnavailable, WebhookNotFound
from giornata.wire.templates import WebhookRecord, WebhookState
from giornata_gateway.config import GatewayConfig, networks_in
from giornata_gateway.webhooks import (
    AT_ONCE,
    AT_ONCE_OF_TENANT,
    ATTEMPT_S,
    CLAIM_S,
    GONE,
    LEAST_BYTES,
    LONGEST_S,
    MAX_URL,
    WebhookService,
    check_url,
    chosen,
    claimed,
    failed,
    headers,
    may_connect,
    pause_s,
    read_secrets,
    revived,
    secret_of,
    send,
)
from tests.patience import HUNG_S
from tests.present import present

POLICY: dict[str, Any] = {"most": 3, "first_s": 5.0}


def hook(name: str = "job", tenant: str = "alice", **fields: object) -> WebhookRecord:
    made = WebhookRecord(job_id=name, tenant=tenant, url="https://example.org/", created_s=0)
    return made.model_copy(update=fields)


def test_one_gateway_claims_it_for_longer_than_an_attempt_takes() -> None:
    first = present(claimed(hook(), "told", 100.0))
    assert first.body == "told"
    assert claimed(first, "told", 100.0 + ATTEMPT_S) is None
    assert CLAIM_S > 2 * ATTEMPT_S
    again = present(claimed(first, "other", 100.0 + CLAIM_S))
    assert again.body == "told", "every attempt tells the same"
    assert claimed(hook(state=WebhookState.DEAD), "told", 100.0) is None


def test_pauses_grow_and_the_last_failure_gives_it_up() -> None:
    now = hook(body="told")
    pauses = []
    for _ in range(3):
        assert now.state is WebhookState.WAITING
        now = failed(now, "status 500", 500, 100.0, **POLICY)
        pauses.append(now.next_s - 100.0)
    assert (now.state, now.attempts, pauses) == (WebhookState.DEAD, 3, [5.0, 20.0, 80.0])
    assert pause_s(3600.0, 20) == LONGEST_S
    again = revived(now)
    assert (again.state, again.attempts, again.body) == (WebhookState.WAITING, 0, "told")


def test_a_receiver_that_wants_no_more_gives_it_up() -> None:
    assert failed(hook(), "status 410", GONE, 0.0, **POLICY).state is WebhookState.DEAD


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


PRIVATE = (
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.1", "224.0.0.1",
    "255.255.255.255", "192.0.2.1", "::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
    "64:ff9b::7f00:1", "64:ff9b::a00:1", "2002:7f00:1::", "2002:a00:1::", "2001:db8::1",
    "fec0::1", "::127.0.0.1", "::10.0.0.1", "::ffff:0:127.0.0.1", "64:ff9b:1::7f00:1", "4000::1", "192.0.0.8",
)  # fmt: skip
PUBLIC = ("1.1.1.1", "2606:4700:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101", "2002:101:101::")


@pytest.mark.parametrize("text", [*PRIVATE, *PUBLIC])
def test_public_addresses_are_connected_to_and_private_ones_in_no_dress(text: str) -> None:
    assert may_connect(ipaddress.ip_address(text), (), plain=False) == (text in PUBLIC)


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_is_judged_alike_in_ipv6(address: ipaddress.IPv4Address) -> None:
    told = may_connect(address, (), plain=False)
    for dress in (f"::ffff:{address}", f"64:ff9b::{address}"):
        assert may_connect(ipaddress.ip_address(dress), (), plain=False) == told


def test_networks_that_the_operator_allows() -> None:
    networks = networks_in("10.1.0.0/16, fd00::/8")
    assert may_connect(ipaddress.ip_address("10.1.2.3"), networks, plain=False)
    assert may_connect(ipaddress.ip_address("::ffff:10.1.2.3"), networks, plain=False)
    assert may_connect(ipaddress.ip_address("fd12::1"), networks, plain=False)
    assert not may_connect(ipaddress.ip_address("10.2.0.1"), networks, plain=False)
    with pytest.raises(ValueError, match=r"10\.1\.2\.3/8"):
        networks_in("10.1.2.3/8")


@pytest.mark.parametrize(
    "url",
    [
        "", "example.org", "//example.org", "http://example.org/", "https://", "https://a b/", "https://example.org:0/",
        "https://example.org:99999/", "https://u@example.org/", "https://example.org/#x", "https://[::1]/",
        "https://[fe80::1%25eth0]/", "https://10.0.0.1/", "https://exämple.org/", "https://example.org/\n",
        "file:///etc/passwd", "gopher://example.org/", "https://example.org/" + "x" * MAX_URL,
    ],
)  # fmt: skip
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(InvalidField) as caught:
        check_url(url, ())
    assert caught.value.field == "webhook"


def test_urls_that_are_taken() -> None:
    for url in ("https://example.org", "https://example.org:8443/a?b=c", "https://1.1.1.1/"):
        assert check_url(url, ()) == url
    assert check_url("http://10.1.2.3/hook", networks_in("10.1.0.0/16"))


def test_plain_http_is_for_the_networks_that_the_operator_allows() -> None:
    networks = networks_in("10.1.0.0/16")
    for text, encrypted, plain in (
        ("10.1.2.3", True, True),
        ("1.1.1.1", True, False),
        ("10.2.0.1", False, False),
    ):
        address = ipaddress.ip_address(text)
        assert may_connect(address, networks, plain=False) is encrypted
        assert may_connect(address, networks, plain=True) is plain
    with pytest.raises(InvalidField):
        check_url("http://1.1.1.1/hook", networks)
    assert check_url("http://inside.example/hook", networks), "its addresses are looked at when it is sent"


async def test_over_plain_http_no_public_address_is_connected_to() -> None:
    outcome = await send(networks_in("10.1.0.0/16"), "http://1.1.1.1/hook", {}, "{}")
    assert outcome == (None, "the address is not allowed")


KEY = "alice.job_1"
HOOK = WebhookRecord(job_id="job_1", tenant="alice", url="https://example.org/", created_s=0, body="{}")
LATER = HOOK.model_copy(update={"next_s": 1e12})
DEAD = HOOK.model_copy(update={"state": WebhookState.DEAD})
News = Sequence[tuple[str, WebhookRecord | None]]


class Records:
    """The bucket, which tells `news`, one in each turn of the loop; each claim finds that the record is gone."""

    def __init__(self, news: News) -> None:
        self.bucket, self.news = self, news
        self.told, self.asked = asyncio.Event(), asyncio.Event()

    async def changes(self, _keys: str) -> AsyncIterator[tuple[str, WebhookRecord | None]]:
        for one in self.news:
            yield one
            await asyncio.sleep(0)
        self.told.set()
        await asyncio.Event().wait()

    async def change(self, *_: object) -> WebhookRecord:
        self.asked.set()
        raise WebhookNotFound

    @asynccontextmanager
    async def listen(self, *_: object) -> AsyncIterator[None]:
        """As the bus: no job ends."""
        yield


@asynccontextmanager
async def following(folder: Path, *news: tuple[str, WebhookRecord | None]) -> AsyncIterator[Following]:
    """A gateway that follows the bucket and sends."""
    secret = folder / "secret"
    secret.write_text("s" * LEAST_BYTES)
    anything = cast("Any", records := Records(news))
    config = GatewayConfig(webhook_secret_file=secret)
    desk = WebhookService(config, anything, anything, anything, lambda _: None)
    async with asyncio.timeout(HUNG_S), desk.sending():
        await records.told.wait()
        yield desk, records


Following = tuple[WebhookService, Records]


@pytest.mark.parametrize(
    ("more", "dead"), [((), 1), ((("bob.job_3", None),), 0)], ids=["three", "one is forgotten"]
)
async def test_webhooks_of_all_tenants_are_counted_by_state(tmp_path: Path, more: Any, dead: int) -> None:
    hooks = (KEY, LATER), ("bob.job_2", LATER), ("bob.job_3", DEAD)
    async with following(tmp_path, *hooks, *more) as (desk, _):
        assert {state: desk.kept(state) for state in WebhookState} == {"waiting": 2, "dead": dead}


async def test_a_webhook_that_is_forgotten_as_it_is_to_be_sent_ends_nothing_else(tmp_path: Path) -> None:
    """Between the choice of a webhook and its task, the news that it was deleted may come."""
    async with following(tmp_path, *[(KEY, HOOK), (KEY, None)] * 5) as (_, records):
        await records.asked.wait()
