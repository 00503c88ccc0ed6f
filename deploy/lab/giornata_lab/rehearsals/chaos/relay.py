"""A network between the services and NATS that can be slow, and deaf or mute in one direction, by instance."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from enum import StrEnum
from typing import Final
from urllib.parse import urlsplit

PIECE_BYTES: Final = 1 << 16
PIECES: Final = 1024
"""Pieces that one direction of a connection may hold; then its sender waits, as behind a full window of TCP."""
_CONNECT: Final = re.compile(rb"CONNECT (\{.*?\})\r\n")
_OTHERS: Final = re.compile(rb',"connect_urls":\[[^\]]*\]')


class Direction(StrEnum):
    """Which way bytes go."""

    OUT = "out"
    """From a service to NATS."""
    IN = "in"
    """From NATS to a service."""


class RelayNetwork:
    """What is wrong with the network now. Bytes that are held arrive late, as TCP sends them again."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        """Time that every piece takes, each way."""
        self._held: dict[tuple[str, Direction], asyncio.Event] = {}

    def hold(self, name: str, direction: Direction) -> None:
        """Let nothing of the instance `name` through in one direction, until :meth:`release`."""
        self._held.setdefault((name, direction), asyncio.Event())

    def release(self, name: str, direction: Direction) -> None:
        """Let everything through that was held, in its order."""
        gate = self._held.pop((name, direction), None)
        if gate is not None:
            gate.set()

    async def open(self, name: str, direction: Direction) -> None:
        """Wait while bytes of `name` are held."""
        while gate := self._held.get((name, direction)):
            await gate.wait()


class _RelayConnection:
    """One client's connection, both ways. The client tells its name in its first command."""

    def __init__(self, network: RelayNetwork) -> None:
        self._network = network
        self._name = ""

    async def run(self, client: _Stream, server: _Stream) -> None:
        """Pass bytes on until one side ends."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for source, target, direction in (
                    (client, server, Direction.OUT),
                    (server, client, Direction.IN),
                ):
                    pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(PIECES)
                    tasks.create_task(self._read(source[0], pieces, direction))
                    tasks.create_task(self._write(target[1], pieces, direction))
        except* ConnectionError:
            pass
        finally:
            for _, writer in (client, server):
                writer.transport.abort()

    async def _read(
        self, source: asyncio.StreamReader, pieces: asyncio.Queue[tuple[float, bytes]], direction: Direction
    ) -> None:
        loop = asyncio.get_running_loop()
        while piece := await source.read(PIECE_BYTES):
            if direction is Direction.OUT and not self._name:
                self._name = _name(piece)
            if direction is Direction.IN and piece.startswith(b"INFO "):
                piece = _OTHERS.sub(b"", piece)
            await pieces.put((loop.time() + self._network.delay_s, piece))
        raise ConnectionResetError

    async def _write(
        self, target: asyncio.StreamWriter, pieces: asyncio.Queue[tuple[float, bytes]], direction: Direction
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s, piece = await pieces.get()
            if (early_s := due_s - loop.time()) > 0:
                await asyncio.sleep(early_s)
            await self._network.open(self._name, direction)
            target.write(piece)
            await target.drain()


_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def _name(piece: bytes) -> str:
    """The client's name in its first command; empty where the command is not there, or not whole."""
    found = _CONNECT.search(piece)
    return str(json.loads(found[1]).get("name") or "") if found else ""


@asynccontextmanager
async def relayed(servers: Callable[[], list[str]], n: int, network: RelayNetwork) -> AsyncIterator[str]:
    """Relays to `n` NATS servers while inside; yields their addresses, with commas between them.

    `servers` gives the addresses of the servers, as soon as there are any.
    """
    async with AsyncExitStack() as undo:
        relays = [await undo.enter_async_context(_relay(i, servers, network)) for i in range(n)]
        yield ",".join(relays)


@asynccontextmanager
async def _relay(index: int, servers: Callable[[], list[str]], network: RelayNetwork) -> AsyncIterator[str]:
    connections: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            place = urlsplit(servers()[index])
            server = await asyncio.open_connection(place.hostname, place.port)
            await _RelayConnection(network).run((reader, writer), server)
        except (OSError, IndexError):  # the server is away
            writer.transport.abort()
        except asyncio.CancelledError:  # asyncio's server would log it
            writer.transport.abort()
        finally:
            connections.discard(task)

    listener = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"nats://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        for task in connections:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*connections, return_exceptions=True)
        await listener.wait_closed()
