"""The file of API keys as the gateway sees it: read at the start, and again when it has changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from giornata.api_keys import KeysFile, KeysFileError, parse
from giornata.wire.errors import ServiceUnavailable

log = structlog.get_logger(__name__)

LOOK_S: Final = 1.0
"""The file is looked at when a request comes, at most this often: a revoked key opens nothing for longer."""

_Version = tuple[int, int, int]
"""Inode, time of the last change in nanoseconds, and size: any change of the file changes them."""


class KeyFile:
    """The keys in a file; ServiceUnavailable where it is missing, or is not such a file.

    A new file that cannot be read is logged, and the keys before it stay.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._looked_s = clock()
        try:
            self._version: _Version | None = self._found()
            self._keys = parse(path.read_bytes())
        except (OSError, KeysFileError) as error:
            raise ServiceUnavailable(
                f"The API keys cannot be read from {path}: {_why(error)}.",
                accepted="a file that `giornata keys create` has made",
            ) from None
        if not self._keys.keys:
            log.warning("no_api_keys", path=str(path), means="every request is refused")

    @property
    def current(self) -> KeysFile:
        """The keys as the file has them, or had them when it could last be read."""
        now_s = self._clock()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._look()
        return self._keys

    def _look(self) -> None:
        version: _Version | None = None
        try:
            version = self._found()
            if version == self._version:
                return
            self._keys = parse(self._path.read_bytes())
            log.info("api_keys_read", path=str(self._path), keys=len(self._keys.keys))
        except (OSError, KeysFileError) as error:
            if version != self._version:
                log.error(
                    "api_keys_not_read", path=str(self._path), why=_why(error), kept=len(self._keys.keys)
                )
        self._version = version  # found before the keys: a file that changed in between is read again

    def _found(self) -> _Version:
        found = self._path.stat()
        return found.st_ino, found.st_mtime_ns, found.st_size


def _why(error: OSError | KeysFileError) -> str:
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else str(error)
