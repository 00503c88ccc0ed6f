"""The file of API keys on disk: read, and changed by one program at a time, whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from giornata.api_keys import KeysFile, KeysFileError, parse, render

MODE: Final = 0o600
"""Mode of a new file; a file that exists keeps its mode and its owner."""


def read(path: Path) -> KeysFile:
    """The keys in the file; no keys where there is no file.

    Raises:
        KeysFileError: it cannot be read, or is not such a file.
    """
    try:
        return parse(path.read_bytes())
    except FileNotFoundError:
        return KeysFile()
    except OSError as error:
        raise KeysFileError(f"{path} cannot be read: {error.strerror}") from error
    except KeysFileError as error:
        raise KeysFileError(f"{path} is {error}") from None


def change(path: Path, changed: Callable[[KeysFile], KeysFile]) -> None:
    """Replace the file by what `changed` makes of it. A reader sees the old file or the new one.

    Raises:
        KeysFileError: it cannot be read or written, or `changed` refuses.
    """
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise KeysFileError(f"the folder {path.parent} cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # until the folder is closed
        _replace(path, render(changed(read(path))))
        os.fsync(folder)
    except OSError as error:
        raise KeysFileError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        os.close(folder)


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            _like(path, handle)
            os.fsync(handle)
        os.replace(name, path)  # noqa: PTH105 - beside mkstemp and fchmod
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)  # noqa: PTH108 - as above
        raise


def _like(path: Path, handle: int) -> None:
    """Give the open file the mode and the owner of `path`, so that who may read it still may."""
    try:
        known = path.stat()
    except FileNotFoundError:
        os.fchmod(handle, MODE)
        return
    own = os.fstat(handle)
    if (known.st_uid, known.st_gid) != (own.st_uid, own.st_gid):
        os.fchown(handle, known.st_uid, known.st_gid)
    os.fchmod(handle, known.st_mode & 0o777)
