"""Copies of blobs in a folder in memory, which the services of one host share.

A copy is a file, named after its key and complete as soon as it has a name: until then it belongs to its writer's open
descriptor, and goes with it. The file's time of change says when the copy ends. Every process removes what has ended.
Files are read, not mapped: a reader dies of a mapped file that another process cuts short, and may verify bytes that
change afterwards.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import structlog
from blake3 import blake3

from giornata.wire.errors import ServiceUnavailable
from giornata.wire.jobs import BlobRef

LIFE_S: Final = 60.0
"""How long a copy is kept at most. The store has it too, so that a later reader finds it there."""
RECOUNT_S: Final = 1.0
"""How old a count of the folder's bytes may be when a copy is added; until then only this process's own are added."""
_NAME: Final = re.compile(r"[0-9a-f]{64}\.blob")

log = structlog.get_logger(__name__)


class Folder:
    """Copies by key. A copy that cannot be made or read is none: no error of the file system leaves this class.

    Make it with :meth:`open`.
    """

    def __init__(self, descriptor: int, limit_bytes: int) -> None:
        self._folder, self._limit_bytes = descriptor, limit_bytes
        self._used_bytes, self._counted_s = 0, 0.0
        self._refused = False
        self._spares: list[int] = []
        """Descriptors of unnamed files that have memory already; one, or a few where threads make them side by side."""

    @classmethod
    @contextmanager
    def open(cls, path: Path, limit_bytes: int) -> Iterator[Folder]:
        """Use the folder `path`, which is made if it is missing, for about `limit_bytes` at most.

        Raises:
            ServiceUnavailable: its file system is unfit, or others than this user may enter it.
        """
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise _unfit(path, error.strerror or "no folder") from error
        try:
            with suppress(OSError):  # some file systems have no locks
                fcntl.flock(descriptor, fcntl.LOCK_SH)  # it is in use: see giornata.scratch
            found = os.fstat(descriptor)
            if found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise _unfit(path, "it has to be this user's alone (mode 0700)")
            folder = cls(descriptor, limit_bytes)
            try:
                os.close(folder._unnamed())
            except OSError as error:
                raise _unfit(path, error.strerror or "no unnamed files") from error
            folder.sweep()
            try:
                yield folder
            finally:
                for spare in folder._spares:
                    os.close(spare)
        finally:
            os.close(descriptor)

    def write(self, key: str, data: bytes, ttl_s: float) -> bool:
        """Keep a copy in place of what the key had; False, and nothing is there, if there is no room for it."""
        self.remove(key)
        now = time.time()
        if not self._has_room(len(data), now):
            return False
        try:
            self._make(_name(key), data, now + min(ttl_s, LIFE_S))
        except OSError as error:
            if not self._refused:  # once: a full file system would say so at every blob
                log.warning("no_copy_in_memory", error=error.strerror, bytes=len(data))
            self._refused = True
            return False
        self._refused = False
        return True

    def read(self, ref: BlobRef) -> bytes | None:
        """What lies under the key of `ref`, not verified; None if that is nothing, or not of its size."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe would be waited for
        try:
            file = os.open(_name(ref.key), flags, dir_fd=self._folder)
        except OSError:
            return None
        try:
            found = os.fstat(file)
            whole = stat.S_ISREG(found.st_mode) and found.st_size == ref.size_bytes
            return os.read(file, ref.size_bytes) if whole and _lives(found, time.time()) else None
        except OSError:
            return None
        finally:
            os.close(file)

    def prepare(self, size_bytes: int) -> None:
        """Have memory for the next copy, of about this size: most of a copy's time goes into finding it."""
        if self._spares:
            return
        with suppress(OSError):
            file = self._unnamed()
            try:
                os.posix_fallocate(file, 0, size_bytes)
            except OSError:
                os.close(file)
                raise
            self._spares.append(file)

    def remove(self, key: str) -> None:
        """Forget a copy, if there is one."""
        with suppress(OSError):
            os.unlink(_name(key), dir_fd=self._folder)

    def sweep(self) -> None:
        """Remove the copies that have ended, of all processes, and count the others."""
        now, used_bytes = time.time(), 0
        for name in filter(_NAME.fullmatch, os.listdir(self._folder)):  # noqa: PTH208 - by descriptor
            with suppress(OSError):  # another process was faster
                found = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
                if _lives(found, now):
                    used_bytes += found.st_size
                else:
                    os.unlink(name, dir_fd=self._folder)
        self._used_bytes, self._counted_s = used_bytes, now

    def _has_room(self, size_bytes: int, now: float) -> bool:
        recent = 0 <= now - self._counted_s < RECOUNT_S
        if not recent or self._used_bytes + size_bytes > self._limit_bytes:
            self.sweep()
        self._used_bytes += size_bytes
        return self._used_bytes <= self._limit_bytes

    def _make(self, name: str, data: bytes, end_s: float) -> None:
        try:
            file = self._spares.pop()
        except IndexError:
            file = self._unnamed()
        try:
            os.ftruncate(file, len(data))
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(file, rest) :]
            os.utime(file, (end_s, end_s))
            # with descriptors of folders the link is followed to the file, as open(2) says of O_TMPFILE
            os.link(f"/proc/self/fd/{file}", name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        finally:
            os.close(file)

    def _unnamed(self) -> int:
        """A file that is gone with its descriptor unless it gets a name, whatever ends this process."""
        return os.open(".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=self._folder)


def _name(key: str) -> str:
    """Keys are of any length and characters; a name tells nothing of them."""
    return f"{blake3(key.encode()).hexdigest()}.blob"


def _lives(found: os.stat_result, now: float) -> bool:
    """Whether a copy's end lies ahead; no further than one may, so that it goes also where the clock was set back."""
    return now < found.st_mtime <= now + LIFE_S + 1


def _unfit(path: Path, reason: str) -> ServiceUnavailable:
    return ServiceUnavailable(
        f"The folder for hand-overs cannot be used ({reason}); is GIORNATA_HANDOVER_FOLDER right?",
        received=str(path),
    )
