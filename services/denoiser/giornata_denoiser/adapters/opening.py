"""The LoRAs of a denoiser's rows: tiers over the LoRA store, and what an attempt keeps of them while it runs."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from giornata.bus.bus import Bus
from giornata.lora_transfer import pieces
from giornata.packed.low_rank import LowRank, low_rank
from giornata.wire.loras import StoredFile
from giornata_denoiser.adapters.store import Budgets, Fetch, LoraTiers
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.families.protocol import Network
from giornata_denoiser.rows.adapters import RowLora
from giornata_denoiser.rows.row import Row


@contextmanager
def tiers_of(config: DenoiserConfig, bus: Bus, network: Network) -> Iterator[LoraTiers[LowRank]]:
    """The tiers of one process. Loads ask the LoRA store on the running event loop, from threads of their own."""
    with ExitStack() as stack:
        folder = config.lora_cache_folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="giornata-loras-")))
        budgets = Budgets(config.lora_disk_mb << 20, config.lora_memory_mb << 20, config.lora_device_mb << 20)
        fetch = _fetching(bus, asyncio.get_running_loop(), config.lora_file_bytes)
        tiers: LoraTiers[LowRank] = LoraTiers(
            fetch, low_rank, network.layers, folder, budgets, loads=config.lora_loads
        )
        yield stack.enter_context(tiers)


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


def _fetching(bus: Bus, loop: asyncio.AbstractEventLoop, limit_bytes: int) -> Fetch:
    async def fetched(lora: RowLora, path: Path) -> None:
        file = await asyncio.to_thread(path.open, "wb")
        try:
            async for piece in pieces(
                bus, StoredFile(sha256=lora.digest, size_bytes=lora.size_bytes), limit_bytes
            ):
                await asyncio.to_thread(file.write, piece)
        finally:
            await asyncio.to_thread(file.close)

    def fetch(lora: RowLora, path: Path) -> None:
        asyncio.run_coroutine_threadsafe(fetched(lora, path), loop).result()

    return fetch
