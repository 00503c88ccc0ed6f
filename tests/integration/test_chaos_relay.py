"""The network between services and NATS that chaos disturbs, with a real server."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from urllib.parse import urlsplit

import nats
import pytest

from giornata.bus.connection import barrier
from giornata_lab.rehearsals.chaos.relay import Direction, RelayNetwork, relayed
from tests.patience import HUNG_S


@pytest.fixture
def network() -> RelayNetwork:
    return RelayNetwork()


async def test_what_is_held_in_one_direction_comes_late_and_in_order(
    nats_url: str, network: RelayNetwork
) -> None:
    async with relayed(lambda: [nats_url], 1, network) as url:
        mute, other = await nats.connect(url, name="mute"), await nats.connect(url, name="other")
        heard_of_mute = await other.subscribe("of.mute")
        heard_of_other = await mute.subscribe("of.other")
        await barrier(mute)
        await barrier(other)
        network.hold("mute", Direction.OUT)
        for number in range(3):
            await mute.publish("of.mute", str(number).encode())
        await other.publish("of.other", b"still heard")
        assert (await heard_of_other.next_msg(HUNG_S)).data == b"still heard"
        with pytest.raises(TimeoutError):
            await heard_of_mute.next_msg(0.3)
        network.release("mute", Direction.OUT)
        assert [(await heard_of_mute.next_msg(HUNG_S)).data for _ in range(3)] == [b"0", b"1", b"2"]
        await mute.close()
        await other.close()


async def test_a_slow_network_delays_each_way(nats_url: str, network: RelayNetwork) -> None:
    async with relayed(lambda: [nats_url], 1, network) as url:
        client = await nats.connect(url, name="slow")
        network.delay_s = 0.2
        began_s = time.monotonic()
        await client.flush()
        assert time.monotonic() - began_s >= 0.4
        network.delay_s = 0.0
        await client.close()


async def test_a_client_sees_that_the_server_is_away(network: RelayNetwork) -> None:
    async with relayed(list, 1, network) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        with suppress(ConnectionResetError):
            await writer.wait_closed()
