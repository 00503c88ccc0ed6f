"""The store's files on disk: uploads that grow, and whole files by their sha-256.

All instances share the folder. What a piece has written stays in it whatever process ends; a whole file appears under
its digest at once, by renaming, and is never written again.
"""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from giornata.lora_transfer import WHOLE_FILES
from giornata.wire import subjects
from giornata.wire.errors import (
    InvalidField,
    LoraNotFound,
    LoraStoreFull,
    LoraTooLarge,
    MalformedMessage,
)
from giornata.wire.loras import PIECE_BYTES, StoredFile

HASHED_BYTES: Final = 4 << 20
_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DIGEST_CHARS: Final = 64


class LoraFiles:
    """Files below `folder`, which is made; at most `file_bytes` each and `total_bytes` together. Blocking."""

    def __init__(self, folder: Path, *, file_bytes: int, total_bytes: int) -> None:
        self._uploads, self._whole = folder / "uploads", folder / WHOLE_FILES
        self.file_bytes, self.total_bytes = file_bytes, total_bytes
        for part in (self._uploads, self._whole):
            part.mkdir(parents=True, exist_ok=True)

    def check(self) -> None:
        """Raise OSError unless files can be written: part of the health check."""
        probe = self._uploads / f".probe-{os.getpid()}"
        probe.write_bytes(b"x")
        probe.unlink()

    def begin(self, upload_id: str) -> int:
        """Make an upload, and return how much of it there is."""
        if self.used_bytes() >= self.total_bytes:
            raise LoraStoreFull(accepted=f"{self.total_bytes} bytes in all files together")
        path = self._upload(upload_id)
        path.touch(mode=0o600)
        return path.stat().st_size

    def write(self, upload_id: str, offset: int, data: bytes) -> int:
        """Write a piece of an upload, and return how many bytes there are from the first one on.

        Raises:
            LoraNotFound: there is no such upload.
            MalformedMessage: the piece is too large, or does not follow what there is.
            LoraTooLarge: the file would be larger than one may be.
            LoraStoreFull: the disk is full.
        """
        if len(data) > PIECE_BYTES:
            raise MalformedMessage(
                "A piece is too large.", received=len(data), accepted=f"{PIECE_BYTES} bytes"
            )
        with _room(), _found(upload_id), self._upload(upload_id).open("r+b") as file:
            there = os.fstat(file.fileno()).st_size
            if not 0 <= offset <= there:
                raise MalformedMessage(
                    "A piece does not follow the others.", received=offset, accepted=f"at most {there}"
                )
            if offset + len(data) > self.file_bytes:
                raise LoraTooLarge(
                    received=f"at least {offset + len(data)} bytes", accepted=f"at most {self.file_bytes}"
                )
            file.seek(offset)
            file.write(data)
        return max(there, offset + len(data))

    def whole(self, upload_id: str, file: StoredFile) -> Path:
        """Where the bytes of a whole upload lie, which are `file`; under their digest where the upload is gone.

        Raises:
            LoraNotFound: there is neither.
            InvalidField: the upload holds other bytes.
        """
        upload, kept = self._upload(upload_id), self._path(file.sha256)
        if not upload.exists() and kept.exists():
            return kept
        with _room(), _found(upload_id), upload.open("rb") as source:
            found = digest_of(source.fileno())
            os.fsync(source.fileno())
        if found != file:
            raise InvalidField(
                "The file that arrived is not the one that was sent.",
                field="sha256",
                received=f"{found.sha256} of {found.size_bytes} bytes",
                accepted=f"{file.sha256} of {file.size_bytes} bytes",
            )
        return upload

    def keep(self, whole: Path, file: StoredFile) -> None:
        """Keep what :meth:`whole` has found, under its digest."""
        os.utime(whole)
        whole.replace(self._path(file.sha256))

    def take_in(self, path: Path, name: str) -> StoredFile:
        """Copy a file into the store; LoraTooLarge where it is larger than one may be."""
        with _room(), path.open("rb") as source:
            if os.fstat(source.fileno()).st_size > self.file_bytes:
                raise LoraTooLarge(accepted=f"at most {self.file_bytes} bytes")
            copy = self._upload(name)
            try:
                with copy.open("wb") as target:
                    while data := source.read(HASHED_BYTES):
                        target.write(data)
                    target.flush()
                    os.fsync(target.fileno())
                with copy.open("rb") as whole:
                    found = digest_of(whole.fileno())
                copy.replace(self._path(found.sha256))
            finally:
                copy.unlink(missing_ok=True)
        return found

    def drop(self, upload_id: str) -> None:
        """Forget an upload; one that is not there is no error."""
        self._upload(upload_id).unlink(missing_ok=True)

    def path(self, sha256: str) -> Path:
        """Where a whole file lies; LoraNotFound where it does not."""
        path = self._path(sha256)
        if not path.exists():
            raise LoraNotFound("The LoRA store does not have this file.", received=sha256)
        return path

    def read(self, sha256: str, offset: int, size_bytes: int) -> bytes:
        """Bytes of a whole file, fewer at its end. A file that is read is not removed soon."""
        if not 0 <= size_bytes <= PIECE_BYTES or offset < 0:
            raise MalformedMessage(
                received=f"{size_bytes} bytes at {offset}", accepted=f"at most {PIECE_BYTES}"
            )
        with self.path(sha256).open("rb") as file:
            if offset == 0:
                os.utime(file.fileno())
            return os.pread(file.fileno(), size_bytes, offset)

    def sweep(self, needed: Callable[[str], bool], *, kept_s: float, uploads_s: float) -> list[str]:
        """Remove whole files that are not `needed` and were not used for `kept_s`; and uploads that stand still.

        Returns:
            Digests of the files, and ids of the uploads, that were removed.
        """
        now_s = time.time()
        idle_s = {self._whole: kept_s, self._uploads: uploads_s}
        removed = []
        for folder, longest_s in idle_s.items():
            for path in folder.iterdir():
                with suppress(FileNotFoundError):  # another instance was faster
                    idle = now_s - path.stat().st_mtime > longest_s
                    if idle and (folder is self._uploads or not needed(path.name)):
                        path.unlink()
                        removed.append(path.name)
        return removed

    def used_bytes(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes().values())

    def sizes(self) -> dict[str, int]:
        """Bytes of each upload by its id, and of each whole file by its digest."""
        return {name: size for folder in (self._uploads, self._whole) for name, size in _sizes(folder)}

    def _upload(self, upload_id: str) -> Path:
        return self._uploads / _named(upload_id)

    def _path(self, sha256: str) -> Path:
        if len(sha256) != _DIGEST_CHARS or not set(sha256) <= set("0123456789abcdef"):
            raise MalformedMessage(received=sha256, accepted="a sha-256 of 64 hexadecimal digits")
        return self._whole / sha256


def digest_of(descriptor: int) -> StoredFile:
    """Digest and size of an open file."""
    total, offset = hashlib.sha256(), 0
    while data := os.pread(descriptor, HASHED_BYTES, offset):
        total.update(data)
        offset += len(data)
    return StoredFile(sha256=total.hexdigest(), size_bytes=offset)


def _named(upload_id: str) -> str:
    """The id as a file's name: no path can be written with its characters."""
    try:
        return subjects.token(upload_id)
    except ValueError as error:
        raise MalformedMessage(str(error)) from error


def _sizes(folder: Path) -> Iterator[tuple[str, int]]:
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):
            yield entry.name, entry.stat().st_size


@contextmanager
def _found(upload_id: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise LoraNotFound("There is no such upload.", received=upload_id) from error


@contextmanager
def _room() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise LoraStoreFull(received=os.strerror(error.errno or 0)) from error
