"""The store's files on disk: uploads that grow, whole files by their sha-256, and whose bytes they are.

All instances share the folder. What a piece has written stays in it whatever process ends; a whole file appears under
its digest at once, by renaming, and is never written again.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from giornata.api_keys import DEFAULT_TENANT
from giornata.lora_files import WHOLE_FILES
from giornata.records import BucketMirror, LoraRecords
from giornata.shares import has_room
from giornata.wire import subjects
from giornata.wire.errors import (
    InvalidField,
    LoraLimit,
    LoraNotFound,
    LoraStoreFull,
    LoraTooLarge,
    MalformedMessage,
)
from giornata.wire.loras import EVERYONE, PIECE_BYTES, LoraRecord, StoredFile

HASHED_BYTES: Final = 4 << 20
_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
MEASURED_BYTES: Final = 64 << 20
"""After so many bytes that came here the folder is measured again: other instances fill it, too."""


class LoraFiles:
    """Files below `folder`, which is made; at most `file_bytes` each and `total_bytes` together. Blocking."""

    def __init__(self, folder: Path, *, file_bytes: int, total_bytes: int) -> None:
        self._uploads, self._whole = folder / "uploads", folder / WHOLE_FILES
        self.file_bytes, self.total_bytes = file_bytes, total_bytes
        for part in (self._uploads, self._whole):
            part.mkdir(parents=True, exist_ok=True)

    def check(self) -> None:
        """Raise OSError unless files can be written: part of the health check.

        The file it writes has no name where the file system allows it: instances that share the folder may all be
        process 1 of their container.
        """
        with tempfile.TemporaryFile(dir=self._uploads, buffering=0) as probe:
            probe.write(b"x")

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
        with _writing(upload_id), self._upload(upload_id).open("r+b") as file:
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
        """Return where the bytes of a whole upload lie, which are `file`; under their digest where the upload is gone.

        Raises:
            LoraNotFound: there is neither.
            InvalidField: the upload holds other bytes.
        """
        upload, kept = self._upload(upload_id), self._path(file.sha256)
        if not upload.exists() and kept.exists():
            return kept
        with _writing(upload_id), upload.open("rb") as source:
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
        with path.open("rb") as source, _writing(name):
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
        """Return where a whole file lies; LoraNotFound where it does not."""
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
        found = {}
        for entry in (*os.scandir(self._uploads), *os.scandir(self._whole)):
            with suppress(FileNotFoundError):  # another instance was faster
                found[entry.name] = entry.stat().st_size
        return found

    def _upload(self, upload_id: str) -> Path:
        try:
            return self._uploads / subjects.token(upload_id)  # no path can be written with its characters
        except ValueError as error:
            raise MalformedMessage(str(error)) from error

    def _path(self, sha256: str) -> Path:
        if not _DIGEST.fullmatch(sha256):
            raise MalformedMessage(received=sha256, accepted="a sha-256 of 64 hexadecimal digits")
        return self._whole / sha256


def digest_of(descriptor: int) -> StoredFile:
    """Digest and size of an open file."""
    total, offset = hashlib.sha256(), 0
    while data := os.pread(descriptor, HASHED_BYTES, offset):
        total.update(data)
        offset += len(data)
    return StoredFile(sha256=total.hexdigest(), size_bytes=offset)


@contextmanager
def _writing(upload_id: str) -> Iterator[None]:
    """Errors of the disk as errors of the tree: there is no such upload, or no room."""
    try:
        yield
    except FileNotFoundError as error:
        raise LoraNotFound("There is no such upload.", received=upload_id) from error
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise LoraStoreFull(received=os.strerror(error.errno or 0)) from error


class TenantStorageQuotas:
    """The bytes of each tenant: of its uploads, its LoRAs, and its deleted LoRAs whose files are not swept yet.

    A file of several tenants counts for the one that had it first. What belongs to no tenant, such as the LoRAs that
    all share, makes the folder smaller.
    """

    def __init__(self, files: LoraFiles, records: LoraRecords) -> None:
        self._files, self._mirror = files, BucketMirror(records.bucket)
        self._sizes: dict[str, int] = {}
        self._owners: dict[str, str] = {}
        """By the name of a file, also after its record has gone."""
        self._held = Counter[str]()
        self._unmeasured = 0
        """Bytes that came here since the folder was measured."""

    def note(self, record: LoraRecord) -> None:
        """Remember the tenant of a record's files: the record may be gone when the folder is measured."""
        for name in record_files(record):
            self._owners.setdefault(name, record.tenant)

    async def measure(self) -> None:
        """Measure the folder's files and count them by tenant."""
        await self._mirror.refresh()
        sizes = await asyncio.to_thread(self._files.sizes)
        for record in sorted(self._mirror.all(), key=lambda one: one.created_s, reverse=True):
            self._owners |= dict.fromkeys(record_files(record), record.tenant)
        self._owners = {name: owner for name, owner in self._owners.items() if name in sizes}
        self._sizes, self._held, self._unmeasured = sizes, Counter(), 0
        for name, size_bytes in sizes.items():
            self._held[self._owners.get(name, EVERYONE)] += size_bytes

    async def check(self, tenant: str, upload_id: str, size_bytes: int) -> None:
        """Count an upload that grows to `size_bytes`.

        Raises:
            LoraLimit: the tenant has its share of the folder.
            LoraStoreFull: the folder is full.
        """
        if self._unmeasured >= MEASURED_BYTES or not self._fits(tenant, upload_id, size_bytes):
            await self.measure()
            if not self._fits(tenant, upload_id, size_bytes):
                raise self._refusal(tenant, upload_id, size_bytes)
        growth = self._growth(upload_id, size_bytes)
        self._owners[upload_id] = tenant
        self._sizes[upload_id] = self._sizes.get(upload_id, 0) + growth
        self._held[tenant] += growth
        self._unmeasured += growth

    def _growth(self, upload_id: str, size_bytes: int) -> int:
        return max(0, size_bytes - self._sizes.get(upload_id, 0))

    def _fits(self, tenant: str, upload_id: str, size_bytes: int, *, alone: bool = False) -> bool:
        held = {name: has for name, has in self._held.items() if name != EVERYONE and has}
        alone |= tenant == DEFAULT_TENANT and held.keys() <= {tenant}
        growth, capacity = self._growth(upload_id, size_bytes), self._files.total_bytes - self._held[EVERYONE]
        return has_room(held, tenant, growth, capacity, alone=alone)

    def _refusal(self, tenant: str, upload_id: str, size_bytes: int) -> LoraLimit | LoraStoreFull:
        more, own, everyones = self._growth(upload_id, size_bytes), self._held[tenant], self._held.total()
        received = f"{more} bytes beside {own} of this tenant's and {everyones} of all"
        accepted = f"{self._files.total_bytes} bytes, shared by all tenants; deleted LoRAs count until their files go"
        if self._fits(tenant, upload_id, size_bytes, alone=True):
            message = "There is no room for another LoRA of this tenant."
            return LoraLimit(message, received=received, accepted=accepted)
        return LoraStoreFull(received=received, accepted=accepted)


def record_files(record: LoraRecord) -> list[str]:
    """The names of the files that a record needs."""
    files = [record.source, record.canonical and record.canonical.file]
    return [record.lora_id, *(file.sha256 for file in files if file)]
