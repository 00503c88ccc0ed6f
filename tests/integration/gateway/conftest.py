"""A module's tests share a gateway, unless they need options of their own.

They run on a virtual clock, with NATS, the blob store and the network in memory. Tests that need real ones are in
modules of their own, marked `real_nats`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.fakes.nats_world.server import MemoryNatsServer, NatsWorld, nats_world
from tests.integration.conftest import in_world
from tests.integration.gateway_fakes import MEMORY_BLOBS, Opening, Stage, open_stage

HERE = Path(__file__).parent


ONE_LOOP = pytest.mark.asyncio(loop_scope="module")
"""The tests of a module run in one event loop: what they share lives there."""


@pytest.hookimpl(tryfirst=True)  # before pytest-asyncio chooses the scope of the loop
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.path.parent == HERE and iscoroutinefunction(metafunc.function):
        metafunc.definition.add_marker(ONE_LOOP, append=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE and pytest_asyncio.is_async_test(item):
            item.add_marker(ONE_LOOP, append=False)


class SharedStage:
    """A gateway that goes from test to test; one that a test has stopped is followed by another."""

    def __init__(self, nats_url: str, redis_url: str, folder: Path) -> None:
        self.servers, self.folder = (nats_url, redis_url), folder
        self.stack = AsyncExitStack()
        self.stage: Stage | None = None

    async def lent(self) -> Stage:
        """The gateway, before a router that has no jobs."""
        if self.stage is not None and not self.stage.stop.is_set():
            await self.stage.router.reset()
            await self.stage.router.announce()
            return self.stage
        await self.close()
        (self.folder / "port").unlink(missing_ok=True)
        self.stage = await self.stack.enter_async_context(open_stage(*self.servers, self.folder))
        return self.stage

    async def close(self) -> None:
        if self.stage is not None:
            await self.stage.router.reset()
        await self.stack.aclose()


@pytest.fixture(scope="module")
def world() -> Iterator[NatsWorld]:
    """NATS servers in memory. At the end all their connections are closed."""
    with nats_world() as world:
        yield world
        assert not any(server.open_connections for server in world.servers.values())


@pytest.fixture(scope="module")
def stage_account(world: NatsWorld) -> str:
    """The address of the shared gateway's server."""
    return world.server().url


@pytest.fixture
def memory_nats(world: NatsWorld) -> MemoryNatsServer:
    """A server of this test alone."""
    return world.server()


@pytest.fixture
def nats_url(request: pytest.FixtureRequest) -> str:
    """The address of the shared gateway's server where a test has it, else of its own server, or of a real one."""
    if not in_world(request.node):
        return str(request.getfixturevalue("nats_url"))
    if "stage" in request.fixturenames:
        return str(request.getfixturevalue("stage_account"))
    server: MemoryNatsServer = request.getfixturevalue("memory_nats")
    return server.url


@pytest.fixture
def redis_url(request: pytest.FixtureRequest) -> str:
    """What stands for a blob store in memory, or the address of the real one that all tests share."""
    url: str = MEMORY_BLOBS if in_world(request.node) else request.getfixturevalue("redis_url")
    return url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_stage(
    stage_account: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SharedStage]:
    shared = SharedStage(stage_account, MEMORY_BLOBS, tmp_path_factory.mktemp("stage"))
    yield shared
    await shared.close()


@pytest_asyncio.fixture(loop_scope="module")
async def stage(shared_stage: SharedStage) -> Stage:
    """A gateway between the shared servers, with a scripted router behind it."""
    return await shared_stage.lent()


@pytest.fixture
def opening(nats_url: str, redis_url: str, tmp_path: Path) -> Opening:
    """Opens a gateway of this test alone, with options; several one after the other."""

    def opened(**options: Any) -> AbstractAsyncContextManager[Stage]:
        (tmp_path / "port").unlink(missing_ok=True)
        return open_stage(nats_url, redis_url, tmp_path, **options)

    return opened
