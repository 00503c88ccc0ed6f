"""Pictures by URL: which connection fetches them, and what is told of a failure. The rest is tested at the door."""

from __future__ import annotations

import aiohttp
import pytest

from giornata.shares import SharedPool
from giornata.wire.errors import InvalidField
from giornata_gateway.config import GatewayConfig
from giornata_gateway.http import remote_pictures
from giornata_gateway.intake.limits import Grow
from giornata_gateway.intake.rules.forms import PictureSource
from giornata_gateway.intake.rules.tenants import Tenant
from giornata_gateway.webhooks.sending import AddressRefusedError, told


@pytest.mark.parametrize(("scheme", "plain"), [("http", True), ("HTTP", True), ("https", False)])
async def test_each_fetch_has_the_connection_of_its_scheme_however_that_is_written(
    monkeypatch: pytest.MonkeyPatch, scheme: str, plain: bool
) -> None:
    grow = Grow(SharedPool(1), Tenant("alice"))
    asked: list[tuple[bool, bool]] = []

    def refuse(_networks: object, *, plain: bool) -> None:
        asked.append((plain, grow.holding.takeable()))
        raise AddressRefusedError

    monkeypatch.setattr(remote_pictures, "guarded_session", refuse)
    config = GatewayConfig(image_hosts="a.example", webhook_networks="10.1.0.0/16")
    with pytest.raises(InvalidField):
        await remote_pictures.read_source(
            config, grow, PictureSource(image_url=f"{scheme}://a.example/a.png"), "images"
        )
    assert asked == [(plain, True)], "what is held meanwhile is another tenant's if need be"


def test_what_is_told_names_no_address() -> None:
    key = aiohttp.client_reqrep.ConnectionKey("a.example", 443, True, True, None, None, None, None)
    refused = AddressRefusedError("10.1.2.3 may not be connected to")
    failed = OSError(111, "Connect call failed ('10.1.2.3', 443)")
    assert told(aiohttp.ClientConnectorError(key, refused)) == "the address is not allowed"
    assert told(aiohttp.ClientConnectorError(key, failed)) == "no connection"
    assert told(aiohttp.ServerTimeoutError()) == told(TimeoutError()) == "no answer in 15 s"
    assert told(ConnectionResetError(104, "10.1.2.3")) == "ConnectionResetError"
