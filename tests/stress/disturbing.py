"""Disturbances of a run: loops that keep the processors busy, and stops of its processes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

RUN_S: Final = (1.0, 4.0)
"""The shortest and the longest time between two stops."""
STOP_S: Final = (0.5, 3.0)
"""The shortest and the longest stop of all processes."""
ALONE_S: Final = 2.0
"""The longest stop of one: after :data:`giornata.fleet.SILENCE_S` the others rightly take it for dead."""


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep so many processors busy while inside."""
    with ExitStack() as stack:
        for _ in range(count):
            command = [sys.executable, "-I", "-S", "-c", "while True: pass"]
            loop = subprocess.Popen(command, start_new_session=True)  # Ctrl-C is the run's
            stack.callback(loop.wait)
            stack.callback(loop.kill)
        yield


def disturb(run: subprocess.Popen[bytes], processes: Callable[[], Iterable[int]], draw: random.Random) -> int:
    """Stop the `processes` of `run` again and again until it ends: all at once, or one alone. Returns how often.

    One that a test has stopped itself, before or meanwhile, stands still until that test lets it go on.
    """
    stops = 0
    while True:
        with suppress(subprocess.TimeoutExpired):
            run.wait(draw.uniform(*RUN_S))
            return stops
        found = [process for process in sorted(processes()) if not _stands_still(process)]
        chosen, stop_s = found, draw.uniform(*STOP_S)
        if found and draw.random() < 0.5:
            chosen, stop_s = [draw.choice(found)], min(stop_s, ALONE_S)
        try:
            _send(chosen, signal.SIGSTOP)
            time.sleep(stop_s)
        finally:
            _send([process for process in chosen if not _is_held(process)], signal.SIGCONT)
        stops += 1


def _stands_still(process: int) -> bool:
    """Whether it is stopped, or is gone."""
    return _status(process, "State")[:1] in {"", "T"}


def _is_held(process: int) -> bool:
    """Whether somebody else has stopped it while it was stopped: a second signal waits for it to go on."""
    stopped = _stands_still(process)  # if not, the first signal may be the one that waits
    waiting = int(_status(process, "ShdPnd") or "0", 16)
    return stopped and bool(waiting >> signal.SIGSTOP - 1 & 1)


def _status(process: int, name: str) -> str:
    """What the system tells of a process; empty if it is gone."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return line.partition(":")[2].strip()
    return ""


def _send(processes: Iterable[int], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)
