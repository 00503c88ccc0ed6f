"""The end of a run: SIGTERM ends it in order, and a watchdog ends what it has started, also where it was killed.

Every program that a run starts inherits a mark in its environment. The watchdog, this file as a program, waits for the
end of the run, and then kills every process that still has the mark.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

MARK: Final = "GIO_TEST_RUN"


def end_with_run(name: str = MARK) -> Callable[[], None]:
    """Have SIGTERM end this run as Ctrl-C does, and start its watchdog; returns a function that ends the watchdog.

    Workers share one watchdog. `name` is the variable that marks the programs of this run.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if name in os.environ:
        return lambda: None
    mark = os.environ[name] = secrets.token_hex(8)
    bare = {key: value for key, value in os.environ.items() if key != name}
    watchdog = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, f"{name}={mark}", str(os.getpid())],
        stdin=subprocess.PIPE,
        start_new_session=True,
        env=bare,
    )

    def end() -> None:
        del os.environ[name]
        watchdog.communicate(b".")  # a process that was forked may have this end of the pipe, too

    return end


def marked(mark: str) -> Iterator[int]:
    """The ids of the processes that have started with the variable `mark`, ``name=value``."""
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if mark.encode() in (place / "environ").read_bytes().split(b"\0"):
                yield int(place.name)


def end_marked(mark: str) -> None:
    """Kill every process with this mark, and those that they start meanwhile."""
    quiet = (
        0  # looks in a row that found nothing: a process in the midst of exec has no environment for a moment
    )
    for _ in range(100):
        found = list(marked(mark))
        for number in found:
            with suppress(OSError):
                os.kill(number, signal.SIGKILL)
        quiet = 0 if found else quiet + 1
        if quiet > 1:
            break
        time.sleep(0.02)


def wait_for_end(run: int) -> None:
    """Return when standard input says so, or when the process `run` has ended, whose children may keep that open."""
    try:
        ends = [sys.stdin.fileno(), os.pidfd_open(run)]
    except ProcessLookupError:  # it was killed before this process was up
        return
    except (AttributeError, OSError):  # no such system call here
        ends = [sys.stdin.fileno()]
    select.select(ends, [], [])


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    wait_for_end(int(sys.argv[2]))
    end_marked(sys.argv[1])
