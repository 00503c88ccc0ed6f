"""The shared folder: files that an operator puts there become LoRAs of every tenant, and go with them."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from giornata.wire.errors import GiornataError
from giornata.wire.loras import EVERYONE, LoraRecord, LoraState, StoredFile
from giornata_lora_store.endpoints import LoraStoreEndpoints, validating
from giornata_lora_store.headers import inspect_file

SUFFIX: Final = ".safetensors"
_PART: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}\Z")
"""A model's name as requests write it, and a LoRA's; no path leaves the folder by such parts."""

log = structlog.get_logger(__name__)


class SharedFile(NamedTuple):
    """A file ``<model>/<name>.safetensors``, which is a LoRA of that model for every tenant."""

    model: str
    name: str
    seen: tuple[int, int, int] = (0, 0, 0)
    """Inode, bytes and nanoseconds of the last change, by which an unchanged file is recognised."""


def shared_file(folder: str, file: str) -> SharedFile | None:
    """Return what ``<folder>/<file>`` is; None where one of the two names is not accepted."""
    name = file.removesuffix(SUFFIX)
    if name == file or not _PART.match(folder) or not _PART.match(name):
        return None
    return SharedFile(folder, name)


class SharedFolder:
    """One instance's knowledge of the folder. All instances see the same files, and do the same twice at worst."""

    def __init__(self, folder: Path, intake: LoraStoreEndpoints) -> None:
        self._folder, self._intake = folder, intake
        self._seen: dict[str, SharedFile] = {}
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
        for path, file in found.items():
            if self._seen.get(path) != file:
                await self._take(path, file)
                self._seen[path] = file
                self.unread -= 1
        for path in self._ids.keys() - found.keys():
            await self._forget(path)

    async def _found(self) -> dict[str, SharedFile]:
        found = await asyncio.to_thread(lambda: dict(self._entries()))
        self.unread = sum(self._seen.get(path) != file for path, file in found.items())
        return found

    async def _take(self, path: str, file: SharedFile) -> None:
        take_in, name = self._intake.files.take_in, f"shared_{secrets.token_hex(8)}"
        try:
            stored = await asyncio.to_thread(take_in, self._folder / path, name)
        except FileNotFoundError:  # it has just gone
            return
        except GiornataError as error:
            log.warning("shared_lora_refused", path=path, error=str(error))
            return
        record = await self._record(path, file, stored)
        if self._ids.get(path, record.lora_id) != record.lora_id:
            await self._forget(path)
        self._ids[path] = record.lora_id
        await self._intake.begun(record)

    async def _record(self, path: str, file: SharedFile, stored: StoredFile) -> LoraRecord:
        record = validating(EVERYONE, file.model, file.name, stored)
        record = record.model_copy(update={"shared_path": path})
        files, limits = self._intake.files, self._intake.limits
        try:
            header = await asyncio.to_thread(inspect_file, files.path(stored.sha256), limits)
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

    def _entries(self) -> Iterator[tuple[str, SharedFile]]:
        """Relative path of each file, and what it is. No link is followed, so that none leads out."""
        for folder in os.scandir(self._folder):
            if not folder.is_dir(follow_symlinks=False):
                self._refuse(folder.name, "is no folder of a model")
                continue
            for entry in os.scandir(folder):
                path, file = f"{folder.name}/{entry.name}", shared_file(folder.name, entry.name)
                if file is None or not entry.is_file(follow_symlinks=False):
                    self._refuse(path, "is no MODEL/NAME.safetensors")
                    continue
                with suppress(FileNotFoundError):
                    stat = entry.stat(follow_symlinks=False)
                    yield path, file._replace(seen=(stat.st_ino, stat.st_size, stat.st_mtime_ns))

    def _refuse(self, path: str, reason: str) -> None:
        if path not in self._refused:
            self._refused.add(path)
            log.warning("shared_path_refused", path=path[:200], reason=reason)
