"""``python -m giornata_denoiser``: the composition root."""

from __future__ import annotations

import asyncio
import sys
from functools import partial

from giornata import runtime
from giornata.wire.workers import ServiceName
from giornata_denoiser.config import DenoiserConfig


async def serve(config: DenoiserConfig, stop: asyncio.Event) -> None:
    """Open NATS, blobs and the model; denoise until `stop`."""
    from giornata.blobs import open_blobs
    from giornata.bus import bus, streams
    from giornata.bus.connection import read_just_made
    from giornata.gpus import gpus_of
    from giornata.planning.cost_model import CostModel
    from giornata.records import JobRecordStore
    from giornata.runtime import keep_freed
    from giornata_denoiser.checkpoint import open_checkpoint
    from giornata_denoiser.pool.ranks import loaded, start_ranks
    from giornata_denoiser.profiling.fitting import profile_of
    from giornata_denoiser.service import Denoiser
    from giornata_denoiser.startup import rehearse

    async with (
        gpus_of(ServiceName.DENOISER, config) as (own, gpus),
        bus.connect_as(ServiceName.DENOISER, own) as connected,
        open_blobs(own.blobs_url) as blobs,
    ):
        kinds = {name.partition(":")[0] for name in own.device_names} or {own.torch_device().type}
        if kinds == {"cpu"}:
            keep_freed()
        await streams.ensure(
            connected.jetstream,
            replicas=own.replicas,
            events_ttl_s=own.result_ttl_s,
            store_bytes=own.nats_store_bytes,
        )
        records = await read_just_made(partial(JobRecordStore.open, connected.jetstream))
        if own.device_names:
            # Started here, since the kernel ends them with the thread that starts them.
            ranks = start_ranks(own)
            checkpoint, profile = await asyncio.to_thread(loaded, own, ranks)
        else:
            ranks = None
            checkpoint = await asyncio.to_thread(open_checkpoint, own)
            await asyncio.to_thread(rehearse, checkpoint)
            profile = await asyncio.to_thread(profile_of, own, checkpoint)
        costs = CostModel.of(profile)
        serving = Denoiser(
            own,
            connected,
            blobs,
            records,
            checkpoint,
            profile=profile,
            costs=costs,
            ranks=ranks,
            gpus=gpus,
        )
        await serving.run(stop)


if __name__ == "__main__":
    sys.exit(runtime.start(ServiceName.DENOISER, DenoiserConfig, serve))
