"""``python -m giornata_router``: the composition root."""

from __future__ import annotations

import asyncio
import sys

from giornata import runtime
from giornata.bus import bus, streams
from giornata.records import Quarantine, Records
from giornata.wire.workers import ServiceName
from giornata_router.config import RouterConfig
from giornata_router.service import Router


async def main(config: RouterConfig, stop: asyncio.Event) -> None:
    """Open NATS, make sure of the streams, route until `stop`."""
    async with bus.connect_as(ServiceName.ROUTER, config) as connected:
        jetstream = connected.jetstream
        await streams.ensure(jetstream, replicas=config.replicas, events_ttl_s=config.result_ttl_s)
        await streams.renew(jetstream, replicas=config.replicas)
        await streams.ensure_queue(jetstream, replicas=config.replicas, queue_limit=config.queue_limit)
        records, quarantine = await Records.open(jetstream), await Quarantine.open(jetstream)
        await Router(connected, records, quarantine, config).run(stop)


if __name__ == "__main__":
    sys.exit(runtime.start(ServiceName.ROUTER, RouterConfig, main))
