"""A NATS server in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from giornata.bus import bus
from giornata.bus.connection import FailFastNatsClient
from giornata.wire.errors import ServiceUnavailable
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
