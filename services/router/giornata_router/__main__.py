"""``python -m giornata_router``: the composition root."""

from __future__ import annotations

import asyncio
import sys
from functools import partial

from giornata import runtime
from giornata.blobs import open_blobs
from giornata.bus import bus, streams
from giornata.bus.connection import read_just_made
from giornata.records import JobRecordStore, Quarantine
from giornata.wire.workers import ServiceName
from giornata_router.config import RouterConfig
from giornata_router.service import Router


async def main(config: RouterConfig, stop: asyncio.Event) -> None:
    """Open NATS and blobs, make sure of the streams, route until `stop`."""
    async with (
        bus.connect_as(ServiceName.ROUTER, config) as connected,
        open_blobs(config.blobs_url) as blobs,
    ):
        jetstream = connected.jetstream
        replicas, store_bytes = config.replicas, config.nats_store_bytes
        await streams.ensure(
            jetstream, replicas=replicas, events_ttl_s=config.result_ttl_s, store_bytes=store_bytes
        )
        ttl_s = streams.records_ttl_s(config.result_ttl_s, config.record_linger_s)
        await streams.update(jetstream, replicas=replicas, store_bytes=store_bytes, records_ttl_s=ttl_s)
        await streams.ensure_queue(
            jetstream, replicas=replicas, max_messages=config.max_messages, store_bytes=store_bytes
        )
        records = await read_just_made(
            partial(JobRecordStore.open, jetstream, linger_s=config.record_linger_s)
        )
        quarantine = await read_just_made(partial(Quarantine.open, jetstream))
        await Router(connected, blobs, records, quarantine, config).run(stop)


if __name__ == "__main__":
    sys.exit(runtime.start(ServiceName.ROUTER, RouterConfig, main))
