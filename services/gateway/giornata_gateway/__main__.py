"""Composition root: ``python -m giornata_gateway --help``."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack

from giornata import runtime
from giornata.blobs import open_blobs
from giornata.bus import bus
from giornata.wire.workers import ServiceName
from giornata_gateway import service
from giornata_gateway.config import GatewayConfig
from giornata_gateway.gateway import ensure_streams


async def run(config: GatewayConfig, stop: asyncio.Event) -> None:
    """Connect, serve until `stop`, drain."""
    async with AsyncExitStack() as stack:
        connected = await stack.enter_async_context(bus.connect_as(ServiceName.GATEWAY, config))
        blobs = await stack.enter_async_context(open_blobs(config.blobs_url))
        await ensure_streams(connected, config)
        await service.serve(config, connected, blobs, stop)


if __name__ == "__main__":
    sys.exit(runtime.start(ServiceName.GATEWAY, GatewayConfig, run))
