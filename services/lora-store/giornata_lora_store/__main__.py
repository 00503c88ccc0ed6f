"""``python -m giornata_lora_store``: the composition root."""

from __future__ import annotations

import asyncio
import sys

from giornata import runtime
from giornata.bus.bus import connect_as
from giornata.wire.workers import ServiceName
from giornata_lora_store.config import LoraStoreConfig
from giornata_lora_store.service import LoraStore


async def serve(config: LoraStoreConfig, stop: asyncio.Event) -> None:
    """Open NATS and the folder; serve until `stop`; drain."""
    async with connect_as(ServiceName.LORA_STORE, config) as bus:
        await (await LoraStore.open(config, bus)).run(stop)


if __name__ == "__main__":
    sys.exit(runtime.start(ServiceName.LORA_STORE, LoraStoreConfig, serve))
