"""A run that is ended or killed leaves no server behind: alone, with workers, and under stress."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from tests.ending import MARK, marked
from tests.patience import HUNG_S
from tests.stress.__main__ import RUN

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the watchdog finds processes in /proc"
)
ROOT: Final = Path(__file__).parents[2]
CONFTEST: Final = """
from xdist.workermanage import NodeManager
from tests.ending import end_with_run

NodeManager.EXIT_TIMEOUT = 1  # seconds that workers have for their finalizers

def pytest_configure(config):
    config.add_cleanup(end_with_run())
"""
TEST: Final = """
import os, signal, socket, subprocess
import pytest

@pytest.fixture
def server():
    line = socket.create_connection(("127.0.0.1", {port}))
    subprocess.Popen(["sleep", "{hung_s}"], pass_fds=[line.fileno()], start_new_session=True)
    forked = os.fork()  # it has all that this process has, but for the line
    if not forked:
        line.close()
        while True:
            signal.pause()
    yield line, forked
    line.sendall(b"torn down ")

def test_hangs(server):
    line, forked = server
    line.sendall(f"{{os.environ.get('{mark}')}} {{forked}}\\n".encode())
    while True:
        signal.pause()
"""
ALONE: Final = ("pytest", "-p", "no:cacheprovider")
WORKERS: Final = (*ALONE, "-p", "xdist", "--numprocesses", "2")
STRESS: Final = ("tests.stress", "--rounds", "1", "--loops", "1")


@pytest.mark.parametrize(
    ("program", "number", "end"),
    [
        (ALONE, signal.SIGTERM, "torn down "),
        (WORKERS, signal.SIGKILL, ""),
        (STRESS, signal.SIGTERM, "torn down "),
    ],
    ids=lambda value: value[0] + value[-1] if isinstance(value, tuple) else str(value),
)
def test_a_server_goes_with_the_run_that_started_it(
    tmp_path: Path, program: tuple[str, ...], number: signal.Signals, end: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(HUNG_S)
        test = TEST.format(port=listener.getsockname()[1], hung_s=15 * HUNG_S, mark=RUN)
        (tmp_path / "conftest.py").write_text(CONFTEST)
        (tmp_path / "test_hangs.py").write_text(test)
        env = {name: value for name, value in os.environ.items() if name not in {MARK, RUN}}
        env |= {
            "PYTHONPATH": str(ROOT),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }  # plugins take seconds to import
        command = [sys.executable, "-m", *program, str(tmp_path / "test_hangs.py")]
        with subprocess.Popen(
            command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as run:
            try:
                line, _ = listener.accept()
                line.settimeout(HUNG_S)
                with line, line.makefile() as told:
                    mark, forked = told.readline().split()
                    run.send_signal(number)
                    run.wait(HUNG_S)
                    # The end of the line: the server, which has it too, is gone.
                    assert told.read() == end
            finally:
                run.kill()
                with suppress(NameError, ProcessLookupError):
                    os.kill(int(forked), signal.SIGKILL)
        if number is not signal.SIGKILL:  # then the watchdog has ended, too
            assert list(marked(f"{RUN}={mark}")) == []
