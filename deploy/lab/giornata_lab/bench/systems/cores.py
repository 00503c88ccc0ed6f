"""Which cores a process computes on, and how much it has had of them; of Linux."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

PRODUCTS: Final = """
import torch
torch.set_num_threads(1)
left, right = torch.ones(288, 384, dtype=torch.bfloat16), torch.ones(384, 2688, dtype=torch.bfloat16)
print("ready", flush=True)
while True:
    left @ right
"""
"""Those of a transformer's layer, over and over."""


class Spent(NamedTuple):
    """What a thread has had."""

    ran_s: float
    delayed_s: float
    """How long it could have run and another one had the core."""


def spent(pid: int) -> dict[str, Spent]:
    """Return what the threads of a process have had since they began, by number."""
    found = {}
    for thread in _threads(pid):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            ran, delayed, _ = (thread / "schedstat").read_text(encoding="ascii").split()
            found[thread.name] = Spent(int(ran) / 1e9, int(delayed) / 1e9)
    return found


def since(before: Mapping[str, Spent], now: Mapping[str, Spent]) -> list[Spent]:
    """By thread, between two times; the one that ran most comes first."""
    none = Spent(0.0, 0.0)
    found = [
        Spent(each.ran_s - then.ran_s, each.delayed_s - then.delayed_s)
        for each, then in ((each, before.get(name, none)) for name, each in now.items())
    ]
    return sorted(found, reverse=True)


def pin(pid: int, cores: Collection[int]) -> None:
    """Have all threads of a process, and those that they start, run on these cores."""
    for thread in _threads(pid):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


def _threads(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").iterdir())


@contextmanager
def neighbour(core: int) -> Iterator[Neighbour]:
    """A process that computes on a core when it is told to."""
    with subprocess.Popen([sys.executable, "-c", PRODUCTS], stdout=subprocess.PIPE) as process:
        try:
            if process.stdout is None or not process.stdout.readline():
                raise SystemExit("the process beside does not start")
            pin(process.pid, [core])
            made = Neighbour(process)
            made.rest()
            yield made
        finally:
            process.kill()


class Neighbour:
    """See :func:`neighbour`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def rest(self) -> None:
        """Leave the core to others."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Compute."""
        self._process.send_signal(signal.SIGCONT)
