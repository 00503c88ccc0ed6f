"""Locks between processes of one host; the kernel frees them when their process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Wait until no other process is inside with this folder, and keep others out meanwhile."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # until it is closed
        yield
    finally:
        os.close(handle)


@contextmanager
def lock_if_free(path: Path) -> Iterator[int | None]:
    """Hold the file at `path`, which is made if it is missing; the open file, or None where a process has it."""
    handle = os.open(
        path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600
    )  # not inherited by children that run programs
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield handle
    finally:
        os.close(handle)
