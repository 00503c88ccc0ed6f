"""The folders of a stack: its state and logs, and, while it runs, its sockets."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from giornata.locks import lock_if_free
from giornata_tools.launcher.process import LaunchError

SOCKET_PATH_BYTES: Final = 100
"""A unix socket's path may have 103 bytes (macOS) or 107 (Linux)."""


@contextmanager
def locked(state: Path) -> Iterator[None]:
    """Hold the lock of the state folder `state`: two stacks on one JetStream store would destroy it.

    Raises:
        LaunchError: another stack holds it.
    """
    state.mkdir(parents=True, exist_ok=True)
    with lock_if_free(state / "lock") as lock:
        if lock is None:
            raise LaunchError(
                f"Another stack runs with the state in {state}; stop it first, or start this one with a folder and a "
                "port of its own: giornata up --state FOLDER --port 0."
            )
        yield


def empty(logs: Path) -> None:
    """Make the folder, and remove an earlier stack's files from it and nothing else."""
    logs.mkdir(parents=True, exist_ok=True)
    for path in (*logs.glob("*.log"), *logs.glob("*.port")):
        path.unlink()


def has_room(folder: Path) -> bool:
    """Whether a mebibyte can be written there now; quotas count, too."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 20))
            file.flush()
    except OSError:
        return False
    return True


def socket_folder() -> str:
    """The folder where unix sockets may lie: the temporary one, or ``/tmp`` where its path is too long."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) < SOCKET_PATH_BYTES - 40 else "/tmp"  # noqa: S108 - a fresh folder is made in it
