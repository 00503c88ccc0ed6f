"""Files of LoRAs on their way to and from the store, and the names of their tensors. Free of torch.

They travel in pieces, each acknowledged before the next is sent. A store that is restarted in between goes on with what
it has acknowledged; so do the sender and the reader.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import structlog
from pydantic import BaseModel

from giornata.bus.bus import Bus
from giornata.deadlines import Deadline, retry_soon
from giornata.wire import subjects
from giornata.wire.errors import (
    DeadlineExceeded,
    GiornataError,
    LoraTooLarge,
    LoraUnreadable,
    ServiceUnavailable,
)
from giornata.wire.loras import (
    MESSAGE_BYTES,
    PIECE_BYTES,
    BeginUpload,
    DropUpload,
    FileChunk,
    FinishUpload,
    KeepUpload,
    LoraRecord,
    ReadFile,
    StoredFile,
    UploadChunk,
    UploadProgress,
)

ANSWER_MS: Final = 10_000
"""How long a store may take for one piece; then it is asked again."""
WHOLE_MS: Final = 120_000
"""How long it may take to look at a whole file."""
RESTART_S: Final = 30.0
"""How long a store may be away."""

WHOLE_FILES: Final = "files"
"""Folder of whole files in the store's folder; each is named by its sha-256."""

TIER_NAME: Final = "tier"
"""File in the folder of a host tier that tells the tier's name."""

M = TypeVar("M", bound=BaseModel)

log = structlog.get_logger(__name__)


class LoraUpload:
    """A file that is sent. Make it with :func:`open_upload`."""

    def __init__(self, bus: Bus, tenant: str | None) -> None:
        self._bus, self._tenant = bus, tenant
        self.upload_id = f"upload_{secrets.token_hex(12)}"
        self._pending = bytearray()
        self._digest = hashlib.sha256()
        self.sent_bytes = 0
        """Acknowledged bytes."""

    async def write(self, data: bytes) -> None:
        """Send whole pieces; what is left over goes with the next ones."""
        self._pending += data
        while len(self._pending) >= PIECE_BYTES:
            await self._send(PIECE_BYTES)

    async def whole(self) -> StoredFile:
        """Send what is left; the digest of all that was sent."""
        if self._pending:
            await self._send(len(self._pending))
        return StoredFile(sha256=self._digest.hexdigest(), size_bytes=self.sent_bytes)

    async def finish(self, tenant: str, model: str, name: str | None) -> LoraRecord:
        """Have the file made a LoRA of `tenant` for `model`; raises why it is none."""
        file = await self.whole()
        request = FinishUpload(
            upload_id=self.upload_id, tenant=tenant, model=model, name=name, file=file, remaining_ms=WHOLE_MS
        )
        return await _asked(self._bus, "finish", request, LoraRecord)

    async def keep(self) -> StoredFile:
        """Have the file kept by its digest."""
        file = await self.whole()
        request = KeepUpload(upload_id=self.upload_id, file=file, remaining_ms=WHOLE_MS)
        return await _asked(self._bus, "keep", request, StoredFile)

    async def drop(self) -> None:
        """Have the file forgotten. What is not heard is swept by the store later."""
        request = DropUpload(upload_id=self.upload_id, tenant=self._tenant, remaining_ms=ANSWER_MS)
        try:
            await self._bus.call(subjects.lora("drop"), request, UploadProgress, Deadline.after_ms(ANSWER_MS))
        except GiornataError as error:
            log.info("upload_not_dropped", upload=self.upload_id, error=str(error))

    async def _send(self, size_bytes: int) -> None:
        piece = bytes(self._pending[:size_bytes])
        request = UploadChunk(
            upload_id=self.upload_id,
            tenant=self._tenant,
            offset=self.sent_bytes,
            data=piece,
            remaining_ms=ANSWER_MS,
        )
        await _asked(self._bus, "piece", request, UploadProgress)
        del self._pending[:size_bytes]
        self._digest.update(piece)
        self.sent_bytes += size_bytes


@asynccontextmanager
async def open_upload(bus: Bus, tenant: str | None = None) -> AsyncIterator[LoraUpload]:
    """An upload that has begun; it is dropped where its sender fails. `tenant`: whose LoRA it becomes, if it does."""
    upload = LoraUpload(bus, tenant)
    begin = BeginUpload(upload_id=upload.upload_id, tenant=tenant, remaining_ms=ANSWER_MS)
    try:
        await _asked(bus, "begin", begin, UploadProgress)
        yield upload
    except BaseException:
        await asyncio.shield(upload.drop())
        raise


async def read_pieces(bus: Bus, file: StoredFile, limit_bytes: int) -> AsyncIterator[bytes]:
    """The bytes of a file in the store, piece by piece.

    Raises:
        LoraTooLarge: it has more than `limit_bytes`.
        LoraUnreadable: the store has other bytes under its digest.
    """
    if file.size_bytes > limit_bytes:
        raise LoraTooLarge(received=f"{file.size_bytes} bytes", accepted=f"at most {limit_bytes}")
    digest, offset = hashlib.sha256(), 0
    while offset < file.size_bytes:
        request = ReadFile(sha256=file.sha256, offset=offset, size_bytes=PIECE_BYTES, remaining_ms=ANSWER_MS)
        piece = (await _asked(bus, "read", request, FileChunk)).data
        if not piece:
            break
        yield piece
        digest.update(piece)
        offset += len(piece)
    if (digest.hexdigest(), offset) != (file.sha256, file.size_bytes):
        raise LoraUnreadable(
            "The file in the LoRA store is damaged.", received=f"{offset} bytes of {file.sha256}"
        )


async def fetch(bus: Bus, file: StoredFile, path: Path, limit_bytes: int) -> None:
    """Write a file of the store to `path`; raises as :func:`read_pieces`, and OSError where the disk fails."""
    with path.open("wb") as target:
        async for piece in read_pieces(bus, file, limit_bytes):
            await asyncio.to_thread(target.write, piece)


async def _asked(bus: Bus, verb: subjects.LoraVerb, request: BaseModel, reply: type[M]) -> M:
    """The store's answer, asked again while it is away; every question may come twice."""
    limit_ms = getattr(request, "remaining_ms", ANSWER_MS)

    async def ask() -> M:
        deadline = Deadline.after_ms(limit_ms)
        return await bus.call(subjects.lora(verb), request, reply, deadline, limit_bytes=MESSAGE_BYTES)

    return await retry_soon((ServiceUnavailable, DeadlineExceeded), RESTART_S)(ask)


ALPHA: Final = ".alpha"
_FACTOR: Final = re.compile(
    r"(?P<module>.+?)(?:\.lora_|\.lora\.|\.lora_linear_layer\.|_lora(?P<number>\d?)\.)"
    r"(?P<side>A|B|down|up)(?:\.default)?\.weight\Z"
)


class FactorName(NamedTuple):
    """The parts of the name of a factor."""

    module: str
    """As the file names it; XLabs has two pairs a module, which are told apart by `#1` and `#2`."""
    is_down: bool
    """Whether it is the first factor, which maps down to the rank."""


def read_factor_name(name: str) -> FactorName | None:
    """Return what the name of a tensor says; None if it is no factor's."""
    found = _FACTOR.match(name)
    if found is None:
        return None
    number = f"#{found['number']}" if found["number"] else ""
    return FactorName(found["module"] + number, found["side"] in {"A", "down"})
