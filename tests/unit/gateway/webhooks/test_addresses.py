"""Where webhooks may go."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.wire.errors import InvalidField
from giornata_gateway.webhooks.rules.addresses import MAX_URL, check_url, may_connect, networks_in
from giornata_gateway.webhooks.sending import WebhookSender

PRIVATE = (
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.1", "224.0.0.1",
    "255.255.255.255", "192.0.2.1", "::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
    "64:ff9b::7f00:1", "64:ff9b::a00:1", "2002:7f00:1::", "2002:a00:1::", "2001:db8::1",
    "fec0::1", "::127.0.0.1", "::10.0.0.1", "::ffff:0:127.0.0.1", "64:ff9b:1::7f00:1", "4000::1", "192.0.0.8",
)  # fmt: skip
PUBLIC = ("1.1.1.1", "2606:4700:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101", "2002:101:101::")


@pytest.mark.parametrize("text", PRIVATE)
def test_private_addresses_in_every_dress(text: str) -> None:
    assert not may_connect(ipaddress.ip_address(text), (), plain=False)


@pytest.mark.parametrize("text", PUBLIC)
def test_public_addresses(text: str) -> None:
    assert may_connect(ipaddress.ip_address(text), (), plain=False)


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
    async with WebhookSender.open(networks_in("10.1.0.0/16")) as sender:
        assert await sender.send("http://1.1.1.1/hook", {}, "{}") == (None, "the address is not allowed")
