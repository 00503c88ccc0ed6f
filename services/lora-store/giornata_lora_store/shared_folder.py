"""The shared folder: files that an operator puts there become LoRAs of every tenant, and go with them."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from giornata.wire import loras
from giornata.wire.errors import GiornataError
from giornata.wire.loras import EVERYONE, LoraRecord, LoraState, StoredFile
from giornata_lora_store.endpoints import LoraStoreEndpoints

# Files of the shared folder: ``<model>/<name>.safetensors`` is a LoRA of that model for every tenant.


SUFFIX: Final = ".safetensors"
_PART: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}\Z")
"""A model's name as requests write it, and a LoRA's; no path leaves the folder by such parts."""


@dataclass(frozen=True)
class SharedPath:
    """The parts of a shared file's path."""

    model: str
    name: str


def shared_path(folder: str, file: str) -> SharedPath | None:
    """Return what ``<folder>/<file>`` is; None where one of the two names is not accepted."""
    name = file.removesuffix(SUFFIX)
    if name == file or not _PART.match(folder) or not _PART.match(name):
        return None
    return SharedPath(folder, name)


# The shared folder: files that an operator puts there become LoRAs of every tenant, and go with them.


log = structlog.get_logger(__name__)


class FileFingerprint(NamedTuple):
    """A fingerprint by which an unchanged file is recognised."""

    inode: int
    size_bytes: int
    changed_ns: int


class SharedFolder:
    """One instance's knowledge of the folder. All instances see the same files, and do the same twice at worst."""

    def __init__(self, folder: Path, intake: LoraStoreEndpoints) -> None:
        self._folder, self._intake = folder, intake
        self._seen: dict[str, FileFingerprint] = {}
        self._ids: dict[str, str] = {}
        """By path: the LoRA that the file is."""
        self._refused: set[str] = set()
        self.unread = 0
        """Files that were found and not taken in yet."""

    async def know(self, records: list[LoraRecord]) -> None:
        """Take in what earlier instances have made of the folder, and count its files."""
        shared = [record for record in records if record.tenant == EVERYONE]
        self._ids |= {record.shared_path: record.lora_id for record in shared if record.shared_path}
        await self._found()

    async def look(self) -> None:
        """Take in what is new or has changed, and forget what is gone."""
        found = await self._found()
        for path, (what, seen) in found.items():
            if self._seen.get(path) != seen:
                await self._take(path, what)
                self._seen[path] = seen
                self.unread -= 1
        for path in self._ids.keys() - found.keys():
            await self._forget(path)

    async def _found(self) -> dict[str, tuple[SharedPath, FileFingerprint]]:
        found = await asyncio.to_thread(lambda: dict(self._entries()))
        self.unread = sum(self._seen.get(path) != seen for path, (_, seen) in found.items())
        return found

    async def _take(self, path: str, what: SharedPath) -> None:
        files = self._intake.files
        try:
            file = await asyncio.to_thread(
                files.take_in, self._folder / path, f"shared_{secrets.token_hex(8)}"
            )
        except FileNotFoundError:  # it has just gone
            return
        except GiornataError as error:
            log.warning("shared_lora_refused", path=path, error=str(error))
            return
        record = await self._record(path, what, file)
        if self._ids.get(path, record.lora_id) != record.lora_id:
            await self._forget(path)
        self._ids[path] = record.lora_id
        await self._intake.begun(record)

    async def _record(self, path: str, what: SharedPath, file: StoredFile) -> LoraRecord:
        record = LoraRecord(
            lora_id=loras.lora_id(EVERYONE, what.model, file.sha256),
            tenant=EVERYONE,
            created_s=int(time.time()),
            state=LoraState.VALIDATING,
            model=what.model,
            name=what.name,
            received_bytes=file.size_bytes,
            source=file,
            shared_path=path,
        )
        try:
            header = await asyncio.to_thread(
                self._intake.inspection.inspect, self._intake.files.path(file.sha256)
            )
        except GiornataError as error:
            log.warning("shared_lora_failed", path=path, code=error.code, error=str(error))
            return record.model_copy(update={"state": LoraState.FAILED, "error": error.body()})
        return record.model_copy(update={"style": header.style, "rank": header.rank})

    async def _forget(self, path: str) -> None:
        """Forget the LoRA of a path; a copy of the file elsewhere in the folder is taken in again."""
        lora_id = self._ids.pop(path)
        self._seen.pop(path, None)
        for other, known in self._ids.items():
            if known == lora_id:
                self._seen.pop(other, None)
        with suppress(GiornataError):
            await self._intake.records.delete(await self._intake.records.get(EVERYONE, lora_id))
            log.info("shared_lora_removed", path=path, lora=lora_id)

    def _entries(self) -> Iterator[tuple[str, tuple[SharedPath, FileFingerprint]]]:
        """Relative path, its meaning and what is seen of each file. No link is followed, so that none leads out."""
        for folder in os.scandir(self._folder):
            if not folder.is_dir(follow_symlinks=False):
                self._refuse(folder.name, "is no folder of a model")
                continue
            for entry in os.scandir(folder):
                path, what = f"{folder.name}/{entry.name}", shared_path(folder.name, entry.name)
                if what is None or not entry.is_file(follow_symlinks=False):
                    self._refuse(path, "is no MODEL/NAME.safetensors")
                    continue
                with suppress(FileNotFoundError):
                    stat = entry.stat(follow_symlinks=False)
                    yield path, (what, FileFingerprint(stat.st_ino, stat.st_size, stat.st_mtime_ns))

    def _refuse(self, path: str, reason: str) -> None:
        if path not in self._refused:
            self._refused.add(path)
            log.warning("shared_path_refused", path=path[:200], reason=reason)
