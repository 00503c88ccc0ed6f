"""Which cores a process computes on, and how much it has had of them; of Linux."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Spent(NamedTuple):
    """What all threads of a process have had since they began."""

    ran_s: float
    delayed_s: float
    """How long they could have run and another one had the core."""

    def since(self, before: Spent) -> Spent:
        """Between two times."""
        return Spent(self.ran_s - before.ran_s, self.delayed_s - before.delayed_s)


def spent(pid: int) -> Spent:
    """What the threads that a process has now have had."""
    ran, delayed = 0, 0
    for thread in _threads(pid):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            first, second, _ = (thread / "schedstat").read_text(encoding="ascii").split()
            ran, delayed = ran + int(first), delayed + int(second)
    return Spent(ran / 1e9, delayed / 1e9)


def pin(pid: int, cores: Collection[int]) -> None:
    """Have all threads of a process, and those that they start, run on these cores."""
    for thread in _threads(pid):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


def _threads(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").iterdir())
