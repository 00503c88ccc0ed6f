"""Folders and locks that live as long as the processes that use them, however these end."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final


@contextmanager
def exclusive_lock(folder: Path) -> Iterator[None]:
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


# A folder's owner, and every other user, holds a shared lock on it, which the kernel frees with the
# process. Who makes the next folder of that kind removes those that nobody holds: they were left by
# processes that were killed.


PREFIX: Final = "giornata+"
"""Begins the names, and tells these folders from others that nobody locks. Short, for sockets lie in them."""
_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def scratch_folder(parent: Path | str | None = None) -> Iterator[Path]:
    """A new folder of this user alone in `parent`, by default the temporary one; it is removed on leaving."""
    where = Path(parent or tempfile.gettempdir())
    remove_orphans(where)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=where))
        try:
            held = os.open(folder, _OPEN)
        except FileNotFoundError:  # taken for an orphan before it was locked
            continue
        fcntl.flock(held, fcntl.LOCK_SH)
        if folder.exists():
            break
        os.close(held)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def remove_orphans(parent: Path) -> None:
    """Remove what killed processes of this user have left in `parent`, and nothing that a living one holds."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it has gone, or is another user's
            held = os.open(folder, _OPEN)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(held).st_uid == os.geteuid():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(held)


def keep_process_sockets(folder: Path) -> None:
    """Have :mod:`multiprocessing` keep the sockets of this process in `folder`, not in one that it makes itself."""
    multiprocessing.current_process()._config["tempdir"] = str(folder)  # type: ignore[attr-defined]  # noqa: SLF001 - it takes no other word for it
