"""Composition root: ``python -m giornata_gateway --help``."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack

from giornata import runtime
from giornata.blobs import open_blobs
from giornata.bus import bus, streams
from giornata.wire.workers import ServiceName
from giornata_gateway import service
from giornata_gateway.config import GatewayConfig


async def run(config: GatewayConfig, stop: asyncio.Event) -> None:
    """Connect, serve until `stop`, drain."""
    async with AsyncExitStack() as stack:
        connected = await stack.enter_async_context(bus.connect_as(ServiceName.GATEWAY, config))
        blobs = await stack.enter_async_context(open_blobs(config.blobs_url))
        await streams.ensure_shared(
            connected.jetstream,
            replicas=config.replicas,
            events_ttl_s=config.result_ttl_s,
            store_bytes=config.nats_store_bytes,
        )
        await service.serve(config, connected, blobs, stop)


if __name__ == "__main__":
    sys.exit(runtime.start(ServiceName.GATEWAY, GatewayConfig, run))
