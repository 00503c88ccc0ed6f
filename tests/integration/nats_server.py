"""NATS servers in processes of their own: one, its accounts for one test each, and a cluster of three."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar
from unittest.mock import patch

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.errors import ServiceUnavailableError

from giornata.bus import bus
from giornata.bus.connection import FailFastNatsClient, ask_jetstream
from giornata.nats_users import USERS_CONF, password_file, write_cluster, write_users
from giornata.wire.errors import ServiceUnavailable
from giornata.wire.subjects import NatsRole
from giornata_tools.launcher.plan import free_ports
from tests.patience import HUNG_S

MAX_PAYLOAD_BYTES = 8 << 20
"""What deploy/ configures too: inline pictures of the NATS door."""


@contextmanager
def impatience() -> Iterator[None]:
    """While inside, a connection to NATS that does not come at once does not come: nobody waits for its time limit."""
    connect = FailFastNatsClient.connect

    async def connect_once(client: FailFastNatsClient, **options: Any) -> None:
        once = {"allow_reconnect": False, "max_reconnect_attempts": 1, "reconnect_time_wait": 0}
        await connect(client, **options | once)

    with patch.object(FailFastNatsClient, "connect", connect_once):
        yield


async def refused(url: str, **options: Any) -> str:
    """Why `url` lets nobody in with `options` of :func:`giornata.bus.bus.connect`."""
    with impatience(), pytest.raises(ServiceUnavailable) as raised:
        async with asyncio.timeout(HUNG_S), bus.connect(url, "refused", timeout_s=HUNG_S, **options):
            raise AssertionError(url)
    return raised.value.message


class NatsServer:
    """One nats-server with JetStream; `start` again after `kill` keeps its port and its data.

    Args:
        folder: of its configuration and its store.
        config: more of its configuration; includes are relative to `folder`.
        max_file: of its store.
        max_memory: of streams that it keeps in memory.
        port: for clients; any free one by default.
    """

    def __init__(
        self,
        folder: Path,
        config: str = "",
        max_file: str = "8GB",
        max_memory: str = "512MB",
        port: int | None = None,
    ) -> None:
        self._folder = folder
        self._config = config
        self._max_file, self._max_memory = max_file, max_memory
        self._port = port or free_ports(1)[0]
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
            f'jetstream {{ store_dir: "{self._folder}", max_mem: {self._max_memory}, max_file: {self._max_file} }}\n'
            f"{self._config}\n"
        )
        binary = Path(sys.executable).parent / "nats-server"
        self._process = subprocess.Popen([binary, "-c", config], stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        said = []
        for line in self._process.stderr:
            said.append(line)
            if "Server is ready" in line:
                break
        else:
            raise RuntimeError(
                f"nats-server ended with {self._process.wait()} before it was ready: {''.join(said)}"
            )
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


# Accounts of one NATS server: each is lent to one test, which must leave no connection, and comes back
# empty.


ACCOUNTS: Final = 32
PASSWORD: Final = "password"  # noqa: S105 - it keeps nobody out
SYSTEM: Final = "system"
EVERYONE: Final = "everyone"
"""The account of clients whose address names no user."""

T = TypeVar("T")


class LeakedConnection(AssertionError):
    """A test ended, and connections that it had opened did not."""


def accounts_config(names: list[str]) -> str:
    """The part of a server's configuration that tells its accounts, and the user of each, which has its name."""
    users = {
        name: f'users: [{{user: "{name}", password: "{PASSWORD}"}}]' for name in (*names, SYSTEM, EVERYONE)
    }
    lines = [f"{name}: {{ {users[name]}, jetstream: enabled }}" for name in (*names, EVERYONE)]
    accounts = "\n".join([*lines, f"{SYSTEM}: {{ {users[SYSTEM]} }}"])
    return f"accounts {{\n{accounts}\n}}\nsystem_account: {SYSTEM}\nno_auth_user: {EVERYONE}"


class NatsAccounts:
    """A started server of several accounts, and who is connected to each.

    It watches from a thread of its own: the loop of a test may stand still, and is closed when its connections must be.

    Args:
        folder: of the server.
        count: of accounts that can be lent.
        wait_s: how long it waits for the end of connections that a test has closed.
    """

    def __init__(self, folder: Path, count: int = ACCOUNTS, wait_s: float = HUNG_S) -> None:
        self._wait_s = wait_s
        names = [f"test{number}" for number in range(count)]
        # streams reserve theirs, and take what they hold
        self._server = NatsServer(folder, accounts_config(names), max_file="64GB", max_memory="16GB")
        self._free = deque(names)
        self._connected: defaultdict[str, dict[int, str]] = defaultdict(dict)
        self._gone: defaultdict[str, set[int]] = defaultdict(set)
        self._changed = asyncio.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="nats-accounts", daemon=True)
        self._server.start()
        self._thread.start()
        self._client = self._within(self._watch())

    @property
    def url(self) -> str:
        """The address without a user."""
        return self._server.url

    @contextmanager
    def lent(self) -> Iterator[str]:
        """An empty account's address. On leaving, its connections must be closed; its streams are deleted.

        Raises:
            LeakedConnection: one stays open.
        """
        account = self._free.popleft()
        yield self._url(account)
        self._within(self._emptied(account))
        self._free.append(account)

    def close(self) -> None:
        self._within(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._server.kill()

    def _url(self, user: str) -> str:
        return self._server.url.replace("//", f"//{user}:{PASSWORD}@")

    def _within(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _watch(self) -> Client:
        client = await nats.connect(self._url(SYSTEM))
        await client.subscribe("$SYS.ACCOUNT.*.CONNECT", cb=self._hear_connection)
        await client.subscribe("$SYS.ACCOUNT.*.DISCONNECT", cb=self._hear_end)
        await client.flush()
        return client

    async def _hear_connection(self, message: Msg) -> None:
        client = json.loads(message.data)["client"]
        self._connected[client["acc"]][client["id"]] = client.get("name", "")

    async def _hear_end(self, message: Msg) -> None:
        client = json.loads(message.data)["client"]
        async with self._changed:
            self._gone[client["acc"]].add(client["id"])
            self._changed.notify_all()

    async def _emptied(self, account: str) -> None:
        """Wait until its connections are closed, which the server hears a moment later, and delete its streams."""
        answer = await self._client.request(f"$SYS.REQ.ACCOUNT.{account}.CONNZ", b"{}", timeout=HUNG_S)
        listed = {
            each["cid"]: each.get("name", "") for each in json.loads(answer.data)["data"]["connections"]
        }

        def left() -> list[str]:
            connected = self._connected[account] | listed
            return [connected[each] for each in connected.keys() - self._gone[account]]

        try:
            async with asyncio.timeout(self._wait_s), self._changed:
                await self._changed.wait_for(lambda: not left())
        except TimeoutError as error:
            raise LeakedConnection(f"These connections to NATS were left open: {left()}.") from error
        answer = await self._client.request(f"$JS.API.ACCOUNT.PURGE.{account}", timeout=HUNG_S)
        assert "error" not in json.loads(answer.data), answer.data


# Three real NATS servers in a cluster, to be killed and started again one by one.


NAMES = ("n1", "n2", "n3")


class NatsCluster:
    """The servers by name; each has a store of its own, and all let the same users in."""

    def __init__(self, folder: Path) -> None:
        self.users = folder / "users"
        write_users(self.users, anonymous=None)
        ports = free_ports(2 * len(NAMES))  # at once, for none is held until its server listens
        places = [f"127.0.0.1:{port}" for port in ports[len(NAMES) :]]
        self.servers: dict[str, NatsServer] = {}
        for name, place, port in zip(NAMES, places, ports, strict=False):
            write_cluster(self.users, place, places, f"{name}.conf")
            (folder / name).mkdir()
            includes = f'include "../users/{USERS_CONF}"\ninclude "../users/server/{name}.conf"'
            self.servers[name] = NatsServer(folder / name, f"server_name: {name}\n{includes}", port=port)

    @property
    def url(self) -> str:
        """Addresses of all servers, with commas in between."""
        return ",".join(server.url for server in self.servers.values())

    def password_file(self, user: NatsRole) -> Path:
        return password_file(self.users, user)

    async def leader(self, jetstream: JetStreamContext, stream: str) -> str:
        """Which server leads a stream, once one does."""

        async def read() -> str:
            info = await jetstream.stream_info(stream)
            if info.cluster is None or info.cluster.leader is None:
                raise ServiceUnavailableError
            return info.cluster.leader

        return await ask_jetstream(read, HUNG_S)


@contextmanager
def nats_cluster(folder: Path) -> Iterator[NatsCluster]:
    """Started, until it is left."""
    cluster = NatsCluster(folder)
    try:
        for server in cluster.servers.values():
            server.start()
        yield cluster
    finally:
        for server in cluster.servers.values():
            server.kill()
