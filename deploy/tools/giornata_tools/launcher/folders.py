"""The folders of a stack: one stack at a time in a state folder, fresh logs."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from giornata_tools.launcher.process import LaunchError


@contextmanager
def locked(state: Path) -> Iterator[None]:
    """Hold the lock of the state folder `state`: two stacks on one JetStream store would destroy it.

    Raises:
        LaunchError: another stack holds it.
    """
    state.mkdir(parents=True, exist_ok=True)
    with (state / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LaunchError(f"Another stack runs with the state in {state}; stop it first.") from None
        yield


def empty(logs: Path) -> None:
    """Make the folder, and remove an earlier stack's files from it and nothing else."""
    logs.mkdir(parents=True, exist_ok=True)
    for pattern in ("*.log", "*.port"):
        for path in logs.glob(pattern):
            path.unlink()
