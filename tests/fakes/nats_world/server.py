"""The server's core: connections, subscriptions, queue groups, and answers where nobody listens."""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from unittest import mock
from urllib.parse import ParseResult

import nats.aio.client
from nats.aio.transport import Transport

from tests.fakes.nats_world.jetstream import MemoryJetStream
from tests.fakes.nats_world.messages import ServerMessage, status
from tests.fakes.nats_world.subjects import covers

MAX_PAYLOAD_BYTES: Final = 8 << 20
VERSION: Final = "2.15.1"


@dataclass(eq=False)
class ServerSubscription:
    """One subscription of a connection."""

    link: MemoryLink
    pattern: str
    queue: str
    number: str
    left: int | None = None
    """Messages until it ends by itself."""


@dataclass(eq=False)
class MemoryLink:
    """One connection, with the bytes that are under way in it."""

    server: MemoryNatsServer
    reader: asyncio.StreamReader = field(default_factory=asyncio.StreamReader)
    inbound: bytearray = field(default_factory=bytearray)
    subscriptions: dict[str, ServerSubscription] = field(default_factory=dict)
    told_of_nobody: bool = False
    """Whether the client wants to hear that nobody listens."""
    open: bool = True
    scheduled: bool = False

    def write(self, data: bytes) -> None:
        """Take bytes of the client; the server reads them in the loop's next turn."""
        if self.open:
            self.inbound += data
            if not self.scheduled:
                self.scheduled = True
                asyncio.get_running_loop().call_soon(self.server.read, self)

    def send(self, data: bytes) -> None:
        """Put bytes of the server where the client reads."""
        if self.open:
            self.reader.feed_data(data)

    def end(self) -> None:
        """Break the connection; what the client has not read yet, it still reads."""
        if self.open:
            self.open = False
            self.reader.feed_eof()
            self.server.forget(self)


class MemoryTransport(Transport):
    """What nats-py writes to and reads from, in place of its socket."""

    def __init__(self, servers: dict[str, MemoryNatsServer]) -> None:
        self._servers = servers
        self._link: MemoryLink | None = None

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        """Open a connection to the server of the address."""
        del buffer_size, connect_timeout
        server = self._servers.get(uri.hostname or "")
        if server is None:
            raise ConnectionRefusedError
        self._link = server.accept()

    async def connect_tls(self, *args: Any, **options: Any) -> None:
        """Refuse: the world has no TLS."""
        raise NotImplementedError(args, options)

    def write(self, payload: bytes) -> None:
        """Send bytes."""
        assert self._link
        self._link.write(payload)

    def writelines(self, payload: list[bytes]) -> None:
        """Send bytes."""
        self.write(b"".join(payload))

    async def read(self, buffer_size: int) -> bytes:
        """Return what has come, at least a byte, or nothing at the end."""
        assert self._link
        return await self._link.reader.read(buffer_size)

    async def readline(self) -> bytes:
        """Return a line."""
        assert self._link
        return await self._link.reader.readline()

    async def drain(self) -> None:
        """Do nothing: the server takes whatever is written."""

    async def wait_closed(self) -> None:
        """Do nothing: a connection ends at once."""

    def close(self) -> None:
        """End the connection."""
        if self._link is not None:
            self._link.end()

    def at_eof(self) -> bool:
        """Whether the connection has ended and all is read."""
        return self._link is None or self._link.reader.at_eof()

    def __bool__(self) -> bool:
        return self._link is not None


class MemoryNatsServer:
    """One server with JetStream; :meth:`start` again after :meth:`kill` keeps its address and what it has on disk.

    Make it by :meth:`NatsWorld.server`.
    """

    def __init__(self, host: str, max_file: int, max_memory: int) -> None:
        self.host = host
        self.jetstream = MemoryJetStream(self, max_file, max_memory)
        self._links: set[MemoryLink] = set()
        self._subscriptions: set[ServerSubscription] = set()
        self._heard: dict[str, tuple[list[ServerSubscription], dict[str, list[ServerSubscription]]]] = {}
        self._random = random.Random(0)  # noqa: S311 - which member of a queue group
        self._life, self._up, self._still = 0, False, False
        self._held: list[Callable[[], None]] = []
        """What a frozen server will do when it goes on."""

    @property
    def url(self) -> str:
        return f"nats://{self.host}:4222"

    @property
    def open_connections(self) -> int:
        return len(self._links)

    def start(self) -> None:
        """Take connections."""
        self._up = True
        self.jetstream.begin()

    def kill(self) -> None:
        """End at once, as by a crash: connections break, and what is kept in memory alone is gone."""
        self._life, self._up, self._still = self._life + 1, False, False
        self._held.clear()
        self.jetstream.crash()
        for link in list(self._links):
            link.end()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stand still while inside, with the connections open."""
        self._still = True
        try:
            yield
        finally:
            self._still = False
            held, self._held = self._held, []
            for call in held:
                asyncio.get_running_loop().call_soon(call)

    def later(self, seconds: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        """Have the server do something, unless it is killed before; a frozen one does it as it goes on."""
        life = self._life

        def fire() -> None:
            if life != self._life:
                return
            if self._still:
                self._held.append(fire)
            else:
                call()

        return asyncio.get_running_loop().call_later(seconds, fire)

    def accept(self) -> MemoryLink:
        """Open a connection. A frozen server does not greet it until it goes on."""
        if not self._up:
            raise ConnectionRefusedError
        link = MemoryLink(self)
        self._links.add(link)
        info = {
            "server_id": self.host,
            "server_name": self.host,
            "version": VERSION,
            "proto": 1,
            "host": self.host,
            "port": 4222,
            "headers": True,
            "max_payload": MAX_PAYLOAD_BYTES,
            "jetstream": True,
            "client_id": len(self._links),
        }
        self.later(0, lambda: link.send(b"INFO %s\r\n" % json.dumps(info).encode()))
        return link

    def forget(self, link: MemoryLink) -> None:
        """Take in that a connection has ended."""
        self._links.discard(link)
        for subscription in list(link.subscriptions.values()):
            self._end(subscription)

    def read(self, link: MemoryLink) -> None:
        """Carry out the commands that have come whole."""
        link.scheduled = False
        if self._still:
            self._held.append(lambda: self.read(link))
            return
        buffer = link.inbound
        while link.open and (end := buffer.find(b"\r\n")) >= 0:
            verb, *words = buffer[:end].decode().split()
            if verb in {"PUB", "HPUB"}:
                size, header = int(words[-1]), int(words[-2]) if verb == "HPUB" else 0
                if len(buffer) < end + 4 + size:
                    return
                payload = bytes(buffer[end + 2 : end + 2 + size])
                del buffer[: end + 4 + size]
                reply = words[1] if len(words) > (3 if header else 2) else ""
                if size > MAX_PAYLOAD_BYTES:
                    link.send(b"-ERR 'Maximum Payload Violation'\r\n")
                    link.end()
                    return
                self._take(link, ServerMessage(words[0], reply, payload[:header], payload[header:]))
            else:
                rest = buffer[len(verb) : end].decode()
                del buffer[: end + 2]
                self._obey(link, verb, words, rest)

    def _obey(self, link: MemoryLink, verb: str, words: list[str], rest: str) -> None:
        match verb:
            case "PING":
                link.send(b"PONG\r\n")
            case "SUB":
                subscription = ServerSubscription(
                    link, words[0], words[1] if len(words) == 3 else "", words[-1]
                )
                link.subscriptions[subscription.number] = subscription
                self._subscriptions.add(subscription)
                self._heard.clear()
                self.jetstream.interest_changed()
            case "UNSUB":
                if (found := link.subscriptions.get(words[0])) is not None:
                    found.left = int(words[1]) if len(words) > 1 else 0
                    if not found.left:
                        self._end(found)
            case "CONNECT":
                link.told_of_nobody = bool(json.loads(rest).get("no_responders"))
            case _:
                assert verb == "PONG", verb

    def _end(self, subscription: ServerSubscription) -> None:
        subscription.link.subscriptions.pop(subscription.number, None)
        self._subscriptions.discard(subscription)
        self._heard.clear()
        self.jetstream.interest_changed()

    def _take(self, link: MemoryLink, message: ServerMessage) -> None:
        heard = self.deliver(message)
        taken = self.jetstream.take(message)
        if message.reply and link.told_of_nobody and not heard and not taken:
            self.deliver(ServerMessage(message.reply, "", status("503"), b""))

    def publish(self, subject: str, data: bytes, header: bytes = b"") -> None:
        """Send a message of the server's own."""
        self.deliver(ServerMessage(subject, "", header, data))

    def has_interest(self, subject: str) -> bool:
        """Whether anybody listens."""
        plain, groups = self._listeners(subject)
        return bool(plain or groups)

    def _listeners(
        self, subject: str
    ) -> tuple[list[ServerSubscription], dict[str, list[ServerSubscription]]]:
        found = self._heard.get(subject)
        if found is None:
            plain, groups = list[ServerSubscription](), defaultdict[str, list[ServerSubscription]](list)
            for one in self._subscriptions:
                if covers(one.pattern, subject):
                    (groups[one.queue] if one.queue else plain).append(one)
            found = self._heard[subject] = plain, groups
        return found

    def deliver(self, message: ServerMessage, to: str | None = None) -> bool:
        """Give a message to all who listen on `to`, by default its subject, and to one of each queue group."""
        plain, groups = self._listeners(to or message.subject)
        chosen = [*plain, *(self._random.choice(members) for members in groups.values())]
        for subscription in chosen:
            subscription.link.send(message.encoded(subscription.number))
            if subscription.left is not None:
                subscription.left -= 1
                if not subscription.left:
                    self._end(subscription)
        return bool(chosen)


class NatsWorld:
    """The servers that clients of this process can reach; no other address answers."""

    def __init__(self) -> None:
        self.servers: dict[str, MemoryNatsServer] = {}

    def server(self, *, max_file: int = 8 << 30, max_memory: int = 512 << 20) -> MemoryNatsServer:
        """A started server. `max_file` and `max_memory` limit what its streams may reserve."""
        server = MemoryNatsServer(f"memory-{len(self.servers)}", max_file, max_memory)
        self.servers[server.host] = server
        server.start()
        return server


@contextmanager
def nats_world() -> Iterator[NatsWorld]:
    """A world in which nats-py opens connections in memory, and no others."""
    world = NatsWorld()
    with mock.patch.object(nats.aio.client, "TcpTransport", partial(MemoryTransport, world.servers)):
        yield world
