"""Files of LoRAs from the nearest place that has them: the host tier, the store's own folder, the LoRA store."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog

from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.lora_transfer import ANSWER_MS, TIER_NAME, WHOLE_FILES, pieces
from giornata.wire import subjects
from giornata.wire.errors import GiornataError, ServiceUnavailable
from giornata.wire.host_tiers import TierLoadReply, TierLoadRequest
from giornata.wire.loras import StoredFile
from giornata_denoiser.adapters.files import copied
from giornata_denoiser.rows.adapters import RowLora

DIGEST: Final = re.compile(r"[0-9a-f]{64}")
"""A sha-256: no other name is looked for in a folder."""
NAME_BYTES: Final = 128

T = TypeVar("T")

log = structlog.get_logger(__name__)


def tier_in(folder: Path | None) -> str | None:
    """The name of the host tier that a store fills in `folder`; None where none has done so."""
    if folder is None:
        return None
    try:
        with (folder / TIER_NAME).open(encoding="utf-8") as file:
            return subjects.token(file.read(NAME_BYTES).strip())
    except (OSError, ValueError):
        return None


class LoraStoreFetcher:
    """Fetches files: called in threads, asking on the event loop, until it is closed there.

    Args:
        bus: asks the LoRA stores.
        limit_bytes: largest file.
        folder: the stores' own folder, where this machine has it.
        host_folder: the folder of this machine's host tier.
    """

    def __init__(
        self, bus: Bus, limit_bytes: int, folder: Path | None, host_folder: Path | None = None
    ) -> None:
        self._bus, self._limit_bytes = bus, limit_bytes
        self._folder, self._host_folder = folder, host_folder
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._closed = False
        self._running: set[Future[Any]] = set()

    def __call__(self, lora: RowLora, path: Path, *, ahead: bool) -> None:
        """Write the canonical file of `lora` to `path`; `ahead` of a job that waits for it.

        Raises:
            GiornataError: the store has none, or another.
            ServiceUnavailable: it is closed.
        """
        known = DIGEST.fullmatch(lora.digest) is not None and lora.size_bytes <= self._limit_bytes
        if known and self._from_host(lora, path, ahead=ahead):
            return
        if (
            known
            and self._folder is not None
            and copied(self._folder / WHOLE_FILES / lora.digest, path, lora.digest)
        ):
            return
        self._waited(self._fetched(lora, path))

    def close(self) -> None:
        """Let go of what is being fetched: threads wait for it no longer."""
        with self._lock:
            self._closed, running = True, tuple(self._running)
        for fetch in running:
            fetch.cancel()

    def _from_host(self, lora: RowLora, path: Path, *, ahead: bool) -> bool:
        """Have the file brought to the host tier, and copy it; twice where what is there is damaged."""
        folder, tier = self._host_folder, tier_in(self._host_folder)
        if folder is None or tier is None:
            return False
        for damaged in (False, True):
            try:
                self._waited(self._brought(tier, lora, ahead=ahead, damaged=damaged))
            except ServiceUnavailable:
                if self._closed:
                    raise
                return False
            except GiornataError as error:
                log.info("not_in_host_tier", lora=lora.digest, error=str(error))
                return False
            if copied(folder / WHOLE_FILES / lora.digest, path, lora.digest):
                return True
        return False

    def _waited(self, asking: Coroutine[Any, Any, T]) -> T:
        with self._lock:
            if self._closed:
                asking.close()
                raise ServiceUnavailable("This denoiser is stopping.")
            running = asyncio.run_coroutine_threadsafe(asking, self._loop)
            self._running.add(running)
        try:
            return running.result()
        finally:
            with self._lock:
                self._running.discard(running)

    async def _brought(self, tier: str, lora: RowLora, *, ahead: bool, damaged: bool) -> None:
        file = StoredFile(sha256=lora.digest, size_bytes=lora.size_bytes)
        request = TierLoadRequest(file=file, ahead=ahead, damaged=damaged, remaining_ms=ANSWER_MS)
        await self._bus.call(subjects.bring(tier), request, TierLoadReply, Deadline.after_ms(ANSWER_MS))

    async def _fetched(self, lora: RowLora, path: Path) -> None:
        file = StoredFile(sha256=lora.digest, size_bytes=lora.size_bytes)
        written = await asyncio.to_thread(path.open, "wb")
        try:
            async for piece in pieces(self._bus, file, self._limit_bytes):
                await asyncio.to_thread(written.write, piece)
        finally:
            await asyncio.to_thread(written.close)
