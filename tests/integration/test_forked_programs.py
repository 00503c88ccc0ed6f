"""What a fork has of its own, and what is told of its end."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import forked_programs
from tests.forked_programs import ForkServer
from tests.patience import HUNG_S

TOLD = """
import json, os, random, sys
told = {"pid": os.getpid(), "session": os.getsid(0), "group": os.getpgrp(), "argv": sys.argv, "cwd": os.getcwd()}
told |= {"env": dict(os.environ), "draw": random.random(), "imported": "colorsys" in sys.modules}
print(json.dumps(told | {"files": sorted(os.listdir("/proc/self/fd"))}))
sys.exit(7)
"""
ENDS = """
import atexit, sys, threading, time
class KeptModule:
    def __del__(self): print("taken apart")
sys.modules["kept"] = KeptModule()
atexit.register(print, "at its end")
threading.Thread(target=lambda: (threading.main_thread().join(), print("in a thread"))).start()
print("here")
sys.exit({code})
"""
STOPS = "import signal, sys\nprint('here', flush=True)\nsignal.pause()\n"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    """A server of its own, in place of the worker's."""
    own = ForkServer(["numpy", "colorsys"])
    monkeypatch.setattr(forked_programs, "server", lambda: own)
    yield own
    own.close()


async def run(*argv: str, folder: Path, env: dict[str, str]) -> tuple[Any, Path]:
    with (folder / "out").open("wb") as out:
        given: dict[str, Any] = {"stdin": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.STDOUT}
        process = await forked_programs.spawn(
            *argv, env=env, stdout=out, cwd=folder, start_new_session=True, **given
        )
    return process, folder / "out"


async def test_a_fork_has_a_session_an_environment_and_descriptors_of_its_own(
    server: ForkServer, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(TOLD)
    early = {name: value for name, value in server.env.items() if name in forked_programs.READ_EARLY}
    env = {**early, "ONLY": "this", "PYTHONPATH": str(tmp_path)}
    told = []
    for _ in range(2):
        process, out = await run(sys.executable, "-m", "program", "x", folder=tmp_path, env=env)
        assert await process.wait() == 7
        told.append(json.loads(out.read_text()))
    for one in told:
        assert one["pid"] == one["session"] == one["group"] != os.getpid()
        assert (one["env"], one["argv"][1:], one["cwd"]) == (env, ["x"], str(tmp_path))
        assert one["imported"], "it was forked"
        assert one["files"] == ["0", "1", "2", "3"], "three, and the folder that it looked into"
    assert told[0]["draw"] != told[1]["draw"]


@pytest.mark.parametrize(
    ("code", "status", "told"),
    [("None", 0, []), ("-1", 255, []), ("'why'", 1, ["taken apart", "why"])],
)
async def test_it_ends_as_python_does_but_takes_nothing_apart(
    server: ForkServer, tmp_path: Path, code: str, status: int, told: list[str]
) -> None:
    """But where Python has to tell why."""
    (tmp_path / "program.py").write_text(ENDS.format(code=code))
    process, out = await run(sys.executable, "-m", "program", folder=tmp_path, env=dict(server.env))
    assert await process.wait() == status
    lines = out.read_text().splitlines()
    assert [line for line in lines if line not in told] == ["here", "in a thread", "at its end"]
    assert set(told) <= set(lines)


async def test_its_end_is_told_and_the_end_of_the_server_is_its_own(
    server: ForkServer, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(STOPS)
    env = dict(server.env)
    killed, _ = await run(sys.executable, "-m", "program", folder=tmp_path, env=env)
    left, _ = await run(sys.executable, "-m", "program", folder=tmp_path, env=env)
    killed.kill()
    assert await killed.wait() == -signal.SIGKILL
    ended = os.pidfd_open(left.pid)
    server.close()
    assert await left.wait() == -signal.SIGKILL
    assert select.select([ended], [], [], HUNG_S)[0]
    os.close(ended)
