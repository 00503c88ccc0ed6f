"""Accounts of one NATS server: each is lent to one test, which must leave no connection, and comes back empty.

Accounts share nothing: neither subjects, nor streams, nor the names of either. A client is in the account whose user
its address names, and in one that all share where it names none.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import defaultdict, deque
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from tests.integration.nats_server import NatsServer
from tests.patience import HUNG_S

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
