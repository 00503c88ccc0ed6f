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
"""The shortest and the longest stop."""


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

    One that stands still by itself does so on: a test has stopped it, and wants it to.
    """
    stops = 0
    while True:
        with suppress(subprocess.TimeoutExpired):
            run.wait(draw.uniform(*RUN_S))
            return stops
        found = [process for process in sorted(processes()) if not _stands_still(process)]
        chosen = [draw.choice(found)] if found and draw.random() < 0.5 else found
        try:
            _send(chosen, signal.SIGSTOP)
            time.sleep(draw.uniform(*STOP_S))
        finally:
            _send(chosen, signal.SIGCONT)
        stops += 1


def _stands_still(process: int) -> bool:
    """Whether a process is stopped, or is gone."""
    try:
        state = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return True
    return state == b"T"


def _send(processes: Iterable[int], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)
