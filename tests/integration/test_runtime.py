"""What every process does: exit status, and what signals do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import IO

import pytest

from tests.patience import HUNG_S

PROGRAM = """
import asyncio, sys, threading, time
from giornata import runtime
from giornata.config import ServiceConfig
from giornata.wire.errors import ServiceUnavailable
from giornata.wire.workers import ServiceName

async def main(config, stop):
{body}

sys.exit(runtime.start(ServiceName.ROUTER, ServiceConfig, main))
"""


def start(body: str, log: int | IO[bytes] = subprocess.PIPE) -> subprocess.Popen[str]:
    program = PROGRAM.format(body=textwrap.indent(textwrap.dedent(body), "    "))
    return subprocess.Popen(
        [sys.executable, "-c", program, "--instance", "test-1", "--log-format", "json"],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )


def ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_begins_a_drain_that_ends_well(number: signal.Signals) -> None:
    process = start(
        """
        print("ready", flush=True)
        await stop.wait()
        await asyncio.sleep(0.05)
        print("drained", flush=True)
        """
    )
    ready(process)
    process.send_signal(number)
    out, log = process.communicate(timeout=HUNG_S)
    assert (out, process.returncode) == ("drained\n", 0)
    assert '"instance": "test-1"' in log


def test_a_second_signal_ends_at_once_whatever_hangs() -> None:
    process = start(
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
    ready(process)
    process.terminate()
    ready(process)
    process.terminate()
    process.communicate(timeout=HUNG_S)
    assert process.returncode == 130


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
def test_an_expected_failure_is_one_sentence(body: str) -> None:
    process = start(body)
    _, log = process.communicate(timeout=HUNG_S)
    assert process.returncode == 1
    assert "No server answers." in log
    assert "Traceback" not in log


def test_a_surprise_is_logged_with_its_traceback_and_fails_too() -> None:
    process = start("raise KeyError('vae')")
    _, log = process.communicate(timeout=HUNG_S)
    assert process.returncode == 1
    [line] = [line for line in log.splitlines() if "service_failed" in line]
    assert "Traceback" in line
    assert "KeyError" in line


def test_no_process_ends_for_want_of_a_log_line() -> None:
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
        process = start(body, full)
        ready(process)
        process.terminate()
        out, _ = process.communicate(timeout=HUNG_S)
    lost, told = map(int, out.split())
    assert process.returncode == 0
    assert lost >= told >= 2001, "telemetry tells of them, too"
