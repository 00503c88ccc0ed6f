"""Pictures by URL: which connection fetches them, and what is told of a failure. The rest is tested at the door."""

from __future__ import annotations

import aiohttp
import pytest

from giornata.shares import SharedPool
from giornata.wire.errors import InvalidField
from giornata_gateway.admission import ByteReservation
from giornata_gateway.config import GatewayConfig
from giornata_gateway.http import requests
from giornata_gateway.http.requests import check_sources
from giornata_gateway.rules.forms import PictureSource
from giornata_gateway.rules.tenants import Tenant
from giornata_gateway.webhooks import AddressRefusedError, told


@pytest.mark.parametrize(("scheme", "plain"), [("http", True), ("HTTP", True), ("https", False)])
async def test_each_fetch_has_the_connection_of_its_scheme_however_that_is_written(
    monkeypatch: pytest.MonkeyPatch, scheme: str, plain: bool
) -> None:
    grow = ByteReservation(SharedPool(1), Tenant("alice"))
    asked: list[tuple[bool, bool]] = []

    def refuse(_networks: object, *, plain: bool) -> None:
        asked.append((plain, grow.holding.takeable()))
        raise AddressRefusedError

    monkeypatch.setattr(requests, "guarded_session", refuse)
    config = GatewayConfig(image_hosts="a.example", webhook_networks="10.1.0.0/16")
    source = PictureSource(image_url=f"{scheme}://a.example/a.png")
    with pytest.raises(InvalidField):
        await requests.read_sources(config, grow, [("images", source)])
    assert asked == [(plain, True)], "what is held meanwhile is another tenant's if need be"


HOSTS = "A.example, b.example:8443, [2001:db8::1], [2001:db8::1]:9443"
NAMED = "a.example, b.example:8443"


@pytest.mark.parametrize(
    "url",
    [
        "https://a.example/x.png",
        "https://A.EXAMPLE:443/x.png",
        "http://a.example/x.png",
        "http://a.example:80/x.png",
        "https://b.example:8443/x.png",
        "http://b.example:8443/x.png",
    ],
)
def test_hosts_are_allowed_at_their_usual_port_or_at_the_one_that_is_named(url: str) -> None:
    config = GatewayConfig(image_hosts=HOSTS, webhook_networks="10.1.0.0/16")
    assert check_sources(config, [("images", PictureSource(image_url=url))])


@pytest.mark.parametrize(
    "url",
    [
        "https://a.example:8443/x.png",
        "https://a.example:80/x.png",
        "http://a.example:443/x.png",
        "https://b.example/x.png",
        "https://c.example/x.png",
        "https://[2001:db8::1]:8443/x.png",
        "https://a.example:99999/x.png",
        "https://[a.example/x.png",
        "",
    ],
)
@pytest.mark.parametrize("networks", ["", "10.1.0.0/16"])
def test_other_hosts_and_other_ports_are_refused_with_what_is_allowed(url: str, networks: str) -> None:
    config = GatewayConfig(image_hosts=HOSTS, webhook_networks=networks)
    with pytest.raises(InvalidField, match="No picture is fetched from there") as caught:
        check_sources(config, [("images", PictureSource(image_url=url))])
    assert f"image_url with a data URL, or a URL at [2001:db8::1], [2001:db8::1]:9443, {NAMED}" == (
        caught.value.accepted
    )


@pytest.mark.parametrize(
    ("hosts", "url", "accepted"),
    [
        ("", "http://a.example/x.png", "image_url with a data URL"),
        ("", "https://10.1.2.3/x.png", "image_url with a data URL"),
        ("", "ftp://a.example/x.png", "image_url with a data URL"),
        ("b.example", "http://a.example/x.png", "image_url with a data URL, or a URL at b.example"),
        ("a.example", "http://a.example/x.png", "https://HOST/PATH at a public address"),
        ("10.1.2.3", "https://10.1.2.3/x.png", "https://HOST/PATH at a public address"),
    ],
)
def test_the_host_is_looked_at_first(hosts: str, url: str, accepted: str) -> None:
    with pytest.raises(InvalidField) as caught:
        check_sources(GatewayConfig(image_hosts=hosts), [("mask", PictureSource(image_url=url))])
    assert (caught.value.field, caught.value.received, caught.value.accepted) == ("mask", url, accepted)


def test_what_is_told_names_no_address() -> None:
    key = aiohttp.client_reqrep.ConnectionKey("a.example", 443, True, True, None, None, None, None)
    refused = AddressRefusedError("10.1.2.3 may not be connected to")
    failed = OSError(111, "Connect call failed ('10.1.2.3', 443)")
    assert told(aiohttp.ClientConnectorError(key, refused)) == "the address is not allowed"
    assert told(aiohttp.ClientConnectorError(key, failed)) == "no connection"
    assert told(aiohttp.ServerTimeoutError()) == told(TimeoutError()) == "no answer in 15 s"
    assert told(ConnectionResetError(104, "10.1.2.3")) == "ConnectionResetError"
