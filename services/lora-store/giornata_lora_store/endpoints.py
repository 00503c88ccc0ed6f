"""Files that come in pieces or lie in a shared folder, and what becomes of a whole one."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from giornata.records import LoraRecords
from giornata.wire import loras
from giornata.wire.errors import GiornataError, InvalidField, LoraMismatch, LoraNotFound
from giornata.wire.loras import (
    EVERYONE,
    BeginUpload,
    DropUpload,
    FileChunk,
    FinishUpload,
    KeepUpload,
    LoraRecord,
    LoraState,
    ProfiledLora,
    ReadFile,
    RemoveLora,
    StoredFile,
    UploadChunk,
    UploadProgress,
)
from giornata_lora_store.files import LoraFiles, TenantStorageQuotas
from giornata_lora_store.validation import LoraSizeLimits, inspect_file

TOLD_S: Final = 2.0
"""How often the record of an upload tells what has come; the file itself is the truth."""

log = structlog.get_logger(__name__)


@dataclass
class LoraStoreEndpoints:
    """The endpoints of a store.

    Every question may be asked twice, and pieces of one upload may go to different instances.
    """

    records: LoraRecords
    files: LoraFiles
    limits: LoraSizeLimits
    shares: TenantStorageQuotas
    validate: Callable[[LoraRecord], None]
    """Is told of every LoRA that is to be validated."""
    uploads: int = 0
    finished: int = 0
    read_bytes: int = 0
    _told_s: dict[str, float] = field(default_factory=dict)
    """When the record of an upload was written here last, on the monotonic clock."""

    async def begin(self, request: BeginUpload) -> UploadProgress:
        """Make an upload."""
        if request.tenant is not None:
            await self.shares.measure()
            await self.shares.check(request.tenant, request.upload_id, 1)
        size_bytes = await asyncio.to_thread(self.files.begin, request.upload_id)
        if request.tenant is not None:
            now_s = int(time.time())
            await self.records.create(
                LoraRecord(
                    lora_id=request.upload_id,
                    tenant=request.tenant,
                    created_s=now_s,
                    state=LoraState.UPLOADING,
                    received_bytes=size_bytes,
                    worked_s=now_s,
                )
            )
        self.uploads += 1
        return self._progress(size_bytes)

    async def piece(self, request: UploadChunk) -> UploadProgress:
        """Keep a piece, then acknowledge it."""
        if request.tenant is not None:
            await self.shares.check(request.tenant, request.upload_id, request.offset + len(request.data))
        size_bytes = await asyncio.to_thread(
            self.files.write, request.upload_id, request.offset, request.data
        )
        if request.tenant is not None:
            await self._tell(request.tenant, request.upload_id, size_bytes)
        return self._progress(size_bytes)

    async def finish(self, request: FinishUpload) -> LoraRecord:
        """Make a LoRA of an upload; the same file of the same tenant and model is the same LoRA.

        Raises:
            LoraUnreadable, LoraNotSupported, LoraTooLarge: by its header; the upload stays until it is dropped.
            LoraNotFound, InvalidField: as :meth:`LoraFiles.whole`.
        """
        path = await asyncio.to_thread(self.files.whole, request.upload_id, request.file)
        found = await asyncio.to_thread(inspect_file, path, self.limits)
        await asyncio.to_thread(self.files.keep, path, request.file)
        record = validating(request.tenant, request.model, request.name, request.file)
        record = record.model_copy(update={"style": found.style, "rank": found.rank})
        self.shares.note(record)
        kept = await self.begun(record)
        await self._forget_upload(request.tenant, request.upload_id)
        self.finished += 1
        log.info("lora_uploaded", lora=kept.lora_id, tenant=kept.tenant, state=kept.state)
        return kept

    async def begun(self, record: LoraRecord) -> LoraRecord:
        """The LoRA that `record` is, new or known. One that had failed is validated again."""
        if await self.records.create(record):
            kept = record
        else:
            kept = await self.records.change(
                record.tenant, record.lora_id, lambda known: _again(known, record)
            )
        if kept.state is LoraState.VALIDATING:
            self.validate(kept)
        return kept

    async def keep(self, request: KeepUpload) -> StoredFile:
        """Keep a whole file by its digest."""
        path = await asyncio.to_thread(self.files.whole, request.upload_id, request.file)
        await asyncio.to_thread(self.files.keep, path, request.file)
        return request.file

    async def drop(self, request: DropUpload) -> UploadProgress:
        """Forget an upload that will not go on."""
        await asyncio.to_thread(self.files.drop, request.upload_id)
        if request.tenant is not None:
            await self._forget_upload(request.tenant, request.upload_id)
        return self._progress(0)

    async def read(self, request: ReadFile) -> FileChunk:
        """Give bytes of a file out."""
        data = await asyncio.to_thread(self.files.read, request.sha256, request.offset, request.size_bytes)
        self.read_bytes += len(data)
        return FileChunk(data=data)

    async def remove(self, request: RemoveLora) -> LoraRecord:
        """Forget a LoRA, or an upload. Its files stay for edits that have begun, and are swept later."""
        record = await self.records.get(request.tenant, request.lora_id)
        self.shares.note(record)
        await self.records.delete(record)
        if record.state is LoraState.UPLOADING:
            await asyncio.to_thread(self.files.drop, record.lora_id)
        log.info("lora_removed", lora=record.lora_id, tenant=record.tenant)
        return record

    async def profiled(self, request: ProfiledLora) -> LoraRecord:
        """Note how late a LoRA may join; the same may be told twice. What was deleted meanwhile stays deleted.

        Raises:
            LoraNotFound: there is no such LoRA any more.
            LoraMismatch: its pictures were of another file or checkpoint than it is now.
            InvalidField: that is no share of the steps.
        """
        if not 0 <= request.joins_within < 1:
            raise InvalidField(field="joins_within", received=request.joins_within, accepted="0 to below 1")

        def with_share(known: LoraRecord) -> LoraRecord:
            _check_profiled(known, request)
            return known.model_copy(update={"joins_within": request.joins_within})

        record = await self.records.change(request.tenant, request.lora_id, with_share)
        log.info("lora_profiled", lora=record.lora_id, joins_within=record.joins_within)
        return record

    def _progress(self, size_bytes: int) -> UploadProgress:
        return UploadProgress(size_bytes=size_bytes, limit_bytes=self.files.file_bytes)

    async def _tell(self, tenant: str, upload_id: str, size_bytes: int) -> None:
        now = time.monotonic()
        if now - self._told_s.setdefault(upload_id, now) < TOLD_S:
            return
        self._told_s[upload_id] = now
        news = {"received_bytes": size_bytes, "worked_s": int(time.time())}
        await self.records.change(tenant, upload_id, lambda record: record.model_copy(update=news))

    async def _forget_upload(self, tenant: str, upload_id: str) -> None:
        self._told_s.pop(upload_id, None)
        with suppress(LoraNotFound):
            record = await self.records.get(tenant, upload_id)
            if record.state is LoraState.UPLOADING:
                await self.records.delete(record)


def validating(tenant: str, model: str, name: str | None, file: StoredFile) -> LoraRecord:
    """The record of a LoRA whose source is whole."""
    return LoraRecord(
        lora_id=loras.lora_id(tenant, model, file.sha256),
        tenant=tenant,
        created_s=int(time.time()),
        state=LoraState.VALIDATING,
        model=model,
        name=name,
        received_bytes=file.size_bytes,
        source=file,
    )


def _check_profiled(record: LoraRecord, told: ProfiledLora) -> None:
    canonical = record.canonical
    if canonical and (canonical.file.sha256, canonical.model_digest) == (told.sha256, told.model_digest):
        return
    raise LoraMismatch(
        f"The LoRA {record.lora_id} is another file, or for another checkpoint, than the one that was profiled.",
        received=f"file {told.sha256[:12]}, checkpoint {told.model_digest[:12]}",
        accepted=f"file {canonical.file.sha256[:12]}, checkpoint {canonical.model_digest[:12]}"
        if canonical
        else "none: it is not ready",
    )


def _again(known: LoraRecord, record: LoraRecord) -> LoraRecord | None:
    """Return what a LoRA becomes when its file is sent once more."""
    if known.state is not LoraState.FAILED:
        return None
    return record.model_copy(update={"created_s": known.created_s})


# The shared folder: files that an operator puts there become LoRAs of every tenant, and go with them.

SUFFIX: Final = ".safetensors"
_PART: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}\Z")
"""A model's name as requests write it, and a LoRA's; no path leaves the folder by such parts."""


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
