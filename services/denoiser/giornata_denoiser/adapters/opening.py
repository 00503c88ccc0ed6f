"""The LoRAs of a denoiser's rows: tiers over the LoRA store, and what an attempt keeps of them while it runs."""

from __future__ import annotations

import asyncio
import re
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

from giornata.bus.bus import Bus
from giornata.lora_transfer import WHOLE_FILES, pieces
from giornata.packed.low_rank import LowRank, low_rank
from giornata.wire.errors import ServiceUnavailable
from giornata.wire.loras import StoredFile
from giornata.wire.workers import AdapterLoad
from giornata_denoiser.adapters.files import copied
from giornata_denoiser.adapters.store import Budgets, LoraTiers
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.families.protocol import Network
from giornata_denoiser.rows.adapters import RowLora
from giornata_denoiser.rows.row import Row

DIGEST: Final = re.compile(r"[0-9a-f]{64}")
"""Of a sha-256: no other name is looked for in a folder."""


@contextmanager
def tiers_of(
    config: DenoiserConfig, bus: Bus, network: Network, told: Callable[[AdapterLoad], None]
) -> Iterator[LoraTiers[LowRank]]:
    """The tiers of one process. Loads ask the LoRA store on the running event loop, from threads of their own.

    Each hop of a LoRA is `told`, in these threads.
    """
    with ExitStack() as stack:
        folder = config.lora_cache_folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="giornata-loras-")))
        budgets = Budgets(config.lora_disk_mb << 20, config.lora_memory_mb << 20, config.lora_device_mb << 20)
        fetch = _Fetching(bus, config.lora_file_bytes, config.lora_folder)
        tiers: LoraTiers[LowRank] = LoraTiers(
            fetch,
            low_rank,
            network.layers,
            folder,
            budgets,
            loads=config.lora_loads,
            told=told,
            eviction=config.lora_eviction,
        )
        stack.enter_context(tiers)
        stack.callback(fetch.close)  # first, or the threads would wait for this loop while it waits for them
        yield tiers


@asynccontextmanager
async def held(
    tiers: LoraTiers[LowRank], rows: Iterable[Row]
) -> AsyncIterator[asyncio.Future[list[LowRank]]]:
    """Load the sets of `rows`, and keep them where rows use them.

    The future ends when all are there, or has the first error of a load.
    """
    sets = {row.adapters.loras for row in rows if row.adapters.loras}
    with ExitStack() as stack:
        loads = [asyncio.wrap_future(stack.enter_context(tiers.held(loras))) for loras in sets]
        arriving = asyncio.ensure_future(asyncio.gather(*loads))
        try:
            yield arriving
        finally:
            arriving.cancel()
            await asyncio.wait([arriving])


class _Fetching:
    """Fetches files from the LoRA store: called in threads, asking on the event loop, until it is closed there.

    What the store's own `folder` holds is copied instead.
    """

    def __init__(self, bus: Bus, limit_bytes: int, folder: Path | None) -> None:
        self._bus, self._limit_bytes, self._folder = bus, limit_bytes, folder
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._closed = False
        self._running: set[Future[None]] = set()

    def __call__(self, lora: RowLora, path: Path) -> None:
        """Write the canonical file of `lora` to `path`.

        Raises:
            GiornataError: the store has none, or another.
            ServiceUnavailable: it is closed.
        """
        if self._copied(lora, path):
            return
        with self._lock:
            if self._closed:
                raise ServiceUnavailable("This denoiser is stopping.")
            running = asyncio.run_coroutine_threadsafe(self._fetched(lora, path), self._loop)
            self._running.add(running)
        try:
            running.result()
        finally:
            with self._lock:
                self._running.discard(running)

    def _copied(self, lora: RowLora, path: Path) -> bool:
        if self._folder is None or not DIGEST.fullmatch(lora.digest) or lora.size_bytes > self._limit_bytes:
            return False
        return copied(self._folder / WHOLE_FILES / lora.digest, path, lora.digest)

    def close(self) -> None:
        """Let go of what is being fetched: threads wait for it no longer."""
        with self._lock:
            self._closed, running = True, tuple(self._running)
        for fetch in running:
            fetch.cancel()

    async def _fetched(self, lora: RowLora, path: Path) -> None:
        file = StoredFile(sha256=lora.digest, size_bytes=lora.size_bytes)
        written = await asyncio.to_thread(path.open, "wb")
        try:
            async for piece in pieces(self._bus, file, self._limit_bytes):
                await asyncio.to_thread(written.write, piece)
        finally:
            await asyncio.to_thread(written.close)
