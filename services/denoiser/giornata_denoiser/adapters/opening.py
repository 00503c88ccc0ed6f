"""The LoRAs of a denoiser's rows: tiers over the LoRA store, and what an attempt keeps of them while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

from giornata.bus.bus import Bus
from giornata.packed.low_rank import SequenceLoras, low_rank
from giornata.scratch import scratch_folder
from giornata.wire.workers import AdapterLoad
from giornata_denoiser.adapters.fetching import LoraStoreFetcher
from giornata_denoiser.adapters.store import LoraTierCapacities, LoraTiers
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.families.protocol import Network
from giornata_denoiser.rows.row import Row


@contextmanager
def tiers_of(
    config: DenoiserConfig, bus: Bus, network: Network, told: Callable[[AdapterLoad], None]
) -> Iterator[LoraTiers[SequenceLoras]]:
    """The tiers of one process. Loads ask the LoRA store on the running event loop, from threads of their own.

    Each hop of a LoRA is `told`, in these threads.
    """
    with ExitStack() as stack:
        folder = config.lora_cache_folder
        if folder is None:
            folder = stack.enter_context(scratch_folder())
        budgets = LoraTierCapacities(
            config.lora_disk_mb << 20, config.lora_memory_mb << 20, config.lora_device_mb << 20
        )
        fetch = LoraStoreFetcher(bus, config.lora_file_bytes, config.lora_folder, config.lora_host_folder)
        tiers: LoraTiers[SequenceLoras] = LoraTiers(
            fetch,
            low_rank,
            network.layers,
            folder,
            budgets,
            loads=config.lora_loads,
            told=told,
        )
        stack.enter_context(tiers)
        stack.callback(fetch.close)  # first, or the threads would wait for this loop while it waits for them
        yield tiers


@asynccontextmanager
async def held(
    tiers: LoraTiers[SequenceLoras], rows: Iterable[Row]
) -> AsyncIterator[asyncio.Future[list[SequenceLoras]]]:
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
