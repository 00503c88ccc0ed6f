"""A network within the process: what was sent has come before any time passes.

A connection is a pair of sockets, so that its two ends meet the kernel's buffers. The kernel gives to one end what the
other one writes at once; what it carries by TCP may come later, and a virtual clock would not wait for it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Callable
from typing import Any, Self

from tests.fakes.virtual_time import ClockedLoop


class Endpoint(socket.socket):
    """One end of a connection, which tells addresses, and takes what is set of TCP."""

    def getsockname(self) -> tuple[str, int]:
        """This machine's address."""
        return "127.0.0.1", 0

    getpeername = getsockname

    def setsockopt(self, level: int, *option: Any) -> None:
        """Set an option, unless it is one of TCP."""
        if level != socket.IPPROTO_TCP:
            super().setsockopt(level, *option)


class ListeningPort:
    """A port of the network, in the place of asyncio's server and of its only socket."""

    def __init__(
        self,
        ports: dict[int, ListeningPort],
        port: int,
        accept: Callable[[], asyncio.BaseProtocol],
        held: socket.socket | None,
    ) -> None:
        self._ports, self._port, self.accept, self._held = ports, port, accept, held
        ports[port] = self

    @property
    def sockets(self) -> tuple[Self]:
        """Itself."""
        return (self,)

    def getsockname(self) -> tuple[str, int]:
        """The address."""
        return "127.0.0.1", self._port

    def close(self) -> None:
        """Take no more connections."""
        self._ports.pop(self._port, None)
        if self._held is not None:
            self._held.close()

    async def wait_closed(self) -> None:
        """Do nothing: it ends at once."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class NetworkedLoop(ClockedLoop):
    """A loop whose servers listen in memory; nothing else can be connected to."""

    def __init__(self) -> None:
        super().__init__()
        self._ports: dict[int, ListeningPort] = {}
        self._free = itertools.count(1024)

    async def create_server(  # type: ignore[override]  # what aiohttp asks of it, by plain TCP
        self,
        accept: Callable[[], asyncio.BaseProtocol],
        host: str | None = None,
        port: int | None = None,
        *,
        sock: socket.socket | None = None,
        **_: Any,
    ) -> ListeningPort:
        """Listen at the port of a socket, or at `port`, or at a free one."""
        port = sock.getsockname()[1] if sock is not None else port or next(self._free)
        return ListeningPort(self._ports, port, accept, sock)

    async def dial(self, port: int, *, sent: bytes = b"", receive_buffer: int | None = None) -> socket.socket:
        """The near end of a connection; `sent` has come before the server knows of it.

        With `receive_buffer` the other end can write about so many bytes that are not read.
        """
        if port not in self._ports:
            raise ConnectionRefusedError(port)
        near, far = (Endpoint(fileno=end.detach()) for end in socket.socketpair())
        near.setblocking(False)
        if receive_buffer is not None:
            far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, receive_buffer)
        near.sendall(sent)
        await self.connect_accepted_socket(self._ports[port].accept, far)
        return near

    async def create_connection(  # type: ignore[override]  # of its ways, those of plain TCP
        self,
        protocol: Callable[[], asyncio.BaseProtocol],
        host: str | None = None,
        port: int = 0,
        *,
        sock: socket.socket | None = None,
        **_: Any,
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """Connect to a port, or talk by a socket that is connected."""
        near = await self.dial(port) if sock is None else Endpoint(fileno=sock.detach())
        return await super().create_connection(protocol, sock=near)

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        """Put a connection in the place of a socket that is none yet."""
        with await self.dial(address[1]) as near:
            os.dup2(near.fileno(), sock.fileno())
