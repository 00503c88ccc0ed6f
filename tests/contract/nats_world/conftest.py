"""Every test runs twice: with a server in memory on a virtual clock, and with a real one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import TypeAlias

import pytest

from giornata.bus import bus as buses
from giornata.bus.bus import Bus
from tests.fakes.nats_world.server import MemoryNatsServer, nats_world
from tests.fakes.virtual_time import ClockedLoop
from tests.integration.nats_server import NatsServer

AnyServer: TypeAlias = MemoryNatsServer | NatsServer


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"memory": ClockedLoop, "real": asyncio.new_event_loop}


@pytest.fixture(scope="module")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("nats"), max_file="20MB", max_memory="20MB")
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def server(request: pytest.FixtureRequest) -> AsyncIterator[AnyServer]:
    """A started server without streams, which reserves at most 20 megabytes."""
    if isinstance(asyncio.get_running_loop(), ClockedLoop):
        with nats_world() as world:
            yield world.server(max_file=20_000_000, max_memory=20_000_000)
        return
    server: NatsServer = request.getfixturevalue("real_server")
    async with buses.connect(server.url, "cleaner") as bus:
        for stream in await bus.jetstream.streams_info():
            await bus.jetstream.delete_stream(str(stream.config.name))
    yield server


@pytest.fixture
async def bus(server: AnyServer) -> AsyncIterator[Bus]:
    async with buses.connect(server.url, "one") as connected:
        yield connected


@pytest.fixture
async def other(server: AnyServer) -> AsyncIterator[Bus]:
    async with buses.connect(server.url, "other") as connected:
        yield connected
