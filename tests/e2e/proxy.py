"""A connection that a test can cut: bytes between a browser and a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

PIECE_BYTES = 1 << 16


class Proxy:
    """Passes connections on to `target`, until they are cut."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._open: set[asyncio.StreamWriter] = set()
        self._refusing = False
        self.url = ""

    def cut(self) -> None:
        """Break every connection, and every one that is tried from now on."""
        self._refusing = True
        for writer in self._open:
            writer.transport.abort()

    def mend(self) -> None:
        """Pass connections on again."""
        self._refusing = False

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Proxy]:
        """Listen on a free port while inside."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            self.cut()
            await server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection(self._host, self._port)
        self._open |= {writer, back}
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_pass(reader, back))
                tasks.create_task(_pass(there, writer))
        finally:
            self._open -= {writer, back}


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while piece := await reader.read(PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
    writer.close()
