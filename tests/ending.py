"""The end of a run: SIGTERM ends it in order, and a watchdog ends what it has started, also where it was killed.

Every program that a run starts inherits a mark in its environment. The watchdog, this file as a program, waits at a
pipe for the end of the run, and then kills what still has the mark.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

MARK: Final = "GIO_TEST_RUN"


def end_with_run() -> Callable[[], None]:
    """Have SIGTERM end this run as Ctrl-C does, and start its watchdog; returns what ends that. Workers share one."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if MARK in os.environ:
        return lambda: None
    mark = os.environ[MARK] = secrets.token_hex(8)
    bare = {name: value for name, value in os.environ.items() if name != MARK}
    watchdog = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, mark], stdin=subprocess.PIPE, start_new_session=True, env=bare
    )

    def end() -> None:
        del os.environ[MARK]
        watchdog.communicate(b".")  # a process that was forked may have this end of the pipe, too

    return end


def end_marked(mark: str) -> None:
    """Kill every process with this mark, and those that they start meanwhile."""
    wanted = f"{MARK}={mark}".encode()
    for _ in range(100):
        found = False
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or is another user's
                if wanted in (place / "environ").read_bytes().split(b"\0"):
                    os.kill(int(place.name), signal.SIGKILL)
                    found = True
        if not found:
            break


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read(1)
    end_marked(sys.argv[1])
