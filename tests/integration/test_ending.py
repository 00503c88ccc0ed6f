"""A run that is ended or killed leaves no server behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ending import MARK
from tests.patience import HUNG_S

ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests.ending import end_with_run

def pytest_configure(config):
    config.add_cleanup(end_with_run())
"""
TEST = """
import os, signal, subprocess, sys
import pytest

PIPE = {pipe}

@pytest.fixture
def server():
    held = subprocess.Popen(["sleep", "{hung_s}"], pass_fds=[PIPE], start_new_session=True)
    yield held
    os.write(PIPE, b"torn down ")

def test_hangs(server):
    os.write(PIPE, b"started\\n")
    while True:
        signal.pause()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the watchdog finds processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_goes_with_the_run_that_started_it(tmp_path: Path, number: signal.Signals) -> None:
    reading, writing = os.pipe()
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_hangs.py").write_text(TEST.format(pipe=writing, hung_s=15 * HUNG_S))
    env = {name: value for name, value in os.environ.items() if name != MARK} | {"PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    with (
        os.fdopen(reading) as told,
        subprocess.Popen(
            command, cwd=tmp_path, env=env, pass_fds=[writing], stdout=subprocess.DEVNULL
        ) as run,
    ):
        os.close(writing)
        try:
            assert told.readline() == "started\n"
            run.send_signal(number)
            run.wait(HUNG_S)
            # The end of the pipe: the server, which has it too, is gone.
            assert told.read() == ("torn down " if number is signal.SIGTERM else "")
        finally:
            run.kill()
