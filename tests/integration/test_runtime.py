"""What every process does: exit status, what signals do, and no tracing where it is off."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from giornata.wire.workers import ServiceName
from tests.forked_programs import Program, server
from tests.patience import HUNG_S

PROGRAM = """
import asyncio, sys, threading, time
from giornata import runtime
from giornata.config import ServiceConfig
from giornata.wire.errors import ServiceUnavailable
from giornata.wire.workers import ServiceName

async def main(config, stop):
{body}

sys.argv[:] = ["service", "--instance", "test-1", "--log-format", "json"]
sys.exit(runtime.start(ServiceName.ROUTER, ServiceConfig, main))
"""


def program(body: str) -> str:
    return PROGRAM.format(body=textwrap.indent(textwrap.dedent(body), "    "))


class Service:
    """A service that was forked, with `body` as its main, and what it prints."""

    def __init__(self, process: Any, out: BinaryIO, log: Path) -> None:
        self._process, self._out, self._log = process, out, log

    async def told(self) -> str:
        """The next line that it prints."""
        return (await asyncio.to_thread(self._out.readline)).decode().rstrip()

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self._process.send_signal(number)

    async def ended(self) -> tuple[int, str]:
        """Its status and its log."""
        async with asyncio.timeout(HUNG_S):
            status: int = await self._process.wait()
        return status, self._log.read_text()


Start = Callable[[str], Awaitable[Service]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts a service."""
    with ExitStack() as opened:

        async def started(body: str) -> Service:
            reads, writes = os.pipe()
            out = opened.enter_context(os.fdopen(reads, "rb"))
            path = tmp_path / "log"
            log = os.open(path, os.O_CREAT | os.O_WRONLY)
            asked = Program(("-c", program(body)), os.environ, str(tmp_path))
            process = await server().start(asked, reads, writes, log)  # it reads nothing
            for each in (writes, log):
                os.close(each)
            opened.callback(process.kill)
            return Service(process, out, path)

        yield started


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_begins_a_drain_that_ends_well(start: Start, number: signal.Signals) -> None:
    service = await start(
        """
        print("ready", flush=True)
        await stop.wait()
        await asyncio.sleep(0.05)
        print("drained", flush=True)
        """
    )
    assert await service.told() == "ready"
    service.signal(number)
    assert await service.told() == "drained"
    status, log = await service.ended()
    assert status == 0
    assert '"instance": "test-1"' in log


async def test_a_second_signal_ends_at_once_whatever_hangs(start: Start) -> None:
    service = await start(
        """
        threading.Thread(target=time.sleep, args=(60,)).start()
        try:
            print("ready", flush=True)
            await stop.wait()
            print("ready", flush=True)
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(60)
        """
    )
    for _ in range(2):
        assert await service.told() == "ready"
        service.signal()
    status, _ = await service.ended()
    assert status == 130


@pytest.mark.parametrize(
    "body",
    [
        "raise ServiceUnavailable('No server answers.')",
        """
        async with asyncio.TaskGroup() as tasks:
            async with asyncio.TaskGroup():
                raise ServiceUnavailable('No server answers.')
        """,
    ],
    ids=["plain", "out of task groups"],
)
async def test_an_expected_failure_is_one_sentence(start: Start, body: str) -> None:
    status, log = await (await start(body)).ended()
    assert status == 1
    assert "No server answers." in log
    assert "Traceback" not in log


async def test_a_surprise_is_logged_with_its_traceback_and_fails_too(start: Start) -> None:
    status, log = await (await start("raise KeyError('vae')")).ended()
    assert status == 1
    [line] = [line for line in log.splitlines() if "service_failed" in line]
    assert "Traceback" in line
    assert "KeyError" in line


def test_no_process_ends_for_want_of_a_log_line() -> None:
    """With one true start, whose standard output has a buffer."""
    body = """
        from giornata.bus.bus import state_of
        from giornata.config import ServiceConfig
        from giornata.logs import LogSink
        import structlog
        log = structlog.get_logger("test")
        for number in range(2000):  # more than the stream's buffer holds
            log.warning("line", number=number)
        try:
            raise KeyError("vae")
        except KeyError:
            log.exception("surprise")
        asyncio.get_running_loop().call_exception_handler({"message": "of a library"})
        state = state_of(ServiceName.ROUTER, ServiceConfig(instance="test-1"))
        print("ready", flush=True)
        await stop.wait()
        print(LogSink.lost, state.log_lines_lost, flush=True)
        """
    with Path("/dev/full").open("ab", buffering=0) as full:
        process = subprocess.Popen(
            [sys.executable, "-c", program(body)],
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        out, _ = process.communicate(timeout=HUNG_S)
    lost, told = map(int, out.split())
    assert process.returncode == 0
    assert lost >= told >= 2001, "telemetry tells of them, too"


# What a service imports of OpenTelemetry: nothing where tracing is off.


def started(service: ServiceName, *modules: str, **variables: str) -> set[str]:
    """What of OpenTelemetry a service has imported that has `modules` and a blob store on Redis' protocol."""
    code = f"""
import asyncio, importlib, sys
for module in {modules!r}:
    importlib.import_module(module)
from giornata import runtime
from giornata.config import ServiceConfig
from giornata.wire.errors import ServiceUnavailable
from giornata.wire.workers import ServiceName

async def main(config, stop):
    from giornata.blobs import open_blobs
    try:
        async with asyncio.timeout(0.01), open_blobs("redis://127.0.0.1:1"):
            pass
    except (ServiceUnavailable, TimeoutError):
        assert "redis" in sys.modules
    importlib.import_module("throttled")  # as a gateway's quotas do
    print(*(name for name, module in sys.modules.items() if module and name.startswith("opentelemetry")))

sys.exit(runtime.start(ServiceName({service.value!r}), ServiceConfig, main))
"""
    environment = os.environ | variables
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment
    )
    return set(done.stdout.split())


def test_off_it_is_not_imported() -> None:
    """Redis' client would import its metrics by itself; so nothing imports it before tracing is switched off.

    Services that tests fork cannot import it at all (`tests/forked_programs.py`), and so none needs it.
    """
    assert started(ServiceName.GATEWAY, "giornata_gateway.__main__") == set()


def test_on_it_is_imported() -> None:
    told = started(ServiceName.GATEWAY, GIORNATA_TRACES_URL="http://127.0.0.1:1")
    assert {"opentelemetry.sdk.trace", "opentelemetry.exporter"} <= told
