"""Which door is meant; and that no secret is shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata_tools.doors.addresses import (
    LOCAL_GATEWAY,
    choose_door,
    gateway_url,
    nats_urls,
    without_password,
)

SECRETS = st.text(
    st.characters(codec="ascii", exclude_characters=",", categories=["L", "N", "P", "S"]), min_size=4
).map("secret".__add__)


@pytest.mark.parametrize(
    ("url", "nats", "typed", "expected"),
    [
        (None, None, "", LOCAL_GATEWAY),
        ("http://a:1/", None, "", "http://a:1"),
        ("https://a/under/", None, "url", "https://a/under"),
        (None, "nats://n:1", "", "nats://n:1"),
        ("http://a:1", "nats://n:1", "", "http://a:1"),
        ("http://a:1", "nats://n:1", "nats_url", "nats://n:1"),
        ("http://a:1", "nats://n:1", "url", "http://a:1"),
    ],
)
def test_what_is_typed_goes_before_the_environment(
    url: str | None, nats: str | None, typed: str, expected: str
) -> None:
    assert choose_door(url, nats, {typed}) == expected


def test_two_doors_are_one_too_many() -> None:
    with pytest.raises(ValueError, match="--url and --nats"):
        choose_door("http://a", "nats://n", {"url", "nats_url"})


@pytest.mark.parametrize(
    "url", ["localhost:8000", "127.0.0.1", "nats://a:4222", "http://", "file:///a", "http://a:99999"]
)
def test_what_is_no_gateways_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not the address of a gateway"):
        gateway_url(url)


@pytest.mark.parametrize("url", ["127.0.0.1:4222", "http://a", "nats://", "nats://a:99999", "nats://a,b:1"])
def test_what_is_no_nats_servers_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not the address of a NATS server"):
        choose_door(None, url)
    assert nats_urls("nats://u:p@a:1, tls://b:2") == "nats://u:p@a:1, tls://b:2"


@given(SECRETS, st.sampled_from(["nats", "redis", "https", "unix"]))
def test_no_secret_is_shown(secret: str, scheme: str) -> None:
    for url, place in (
        (f"{scheme}://user:{secret}@host:1/2", "@host:1/2"),
        (f"{scheme}://{secret}@host:1", "@host:1"),
        (f"user:{secret}@host", "@host"),
        (f"nats://a:1,{scheme}://u:{secret}@b:2", "@b:2"),
        (f"{scheme}://host:1?password={secret}", ""),
    ):
        shown = without_password(url)
        assert secret not in shown
        assert shown.endswith(place)


def test_addresses_without_secrets_stay() -> None:
    assert without_password("nats://a:1,nats://b:2") == "nats://a:1,nats://b:2"
    assert without_password("unix:///run/a.sock") == "unix:///run/a.sock"


def test_several_addresses_are_shown_without_their_passwords() -> None:
    shown = without_password("nats://user:secret@a:4222, nats://b:4222")
    assert shown == "nats://***@a:4222, nats://b:4222"
