"""``python -m giornata_prepost``: the composition root.

The processes of the image pool import this module too, under another name, so that they load no torch.
"""

if __name__ == "__main__":
    import asyncio
    import sys

    from giornata import runtime
    from giornata.wire.workers import ServiceName
    from giornata_prepost.config import PrepostConfig

    async def serve(config: PrepostConfig, stop: asyncio.Event) -> None:
        """Open NATS, blobs, image processes and model; serve until `stop`; drain."""
        from giornata.blobs import open_blobs
        from giornata.bus.bus import connect_as
        from giornata.gpus import gpus_of
        from giornata.scratch import keep_process_sockets, scratch_folder
        from giornata_prepost.checkpoint import open_model
        from giornata_prepost.segmenters import open_segmenter
        from giornata_prepost.service import Prepost
        from giornata_prepost.worker_pools import ImagePool

        with scratch_folder() as folder:
            keep_process_sockets(folder)
            async with (
                gpus_of(ServiceName.PREPOST, config) as (own, gpus),
                connect_as(ServiceName.PREPOST, own) as bus,
                open_blobs(own.blobs_url) as blobs,
                ImagePool(own.image_processes) as pool,
            ):
                model = await asyncio.to_thread(open_model, own)
                segmenter = await asyncio.to_thread(open_segmenter, own)
                await Prepost(own, blobs, pool, model, gpus=gpus, segmenter=segmenter).run(bus, stop)

    sys.exit(runtime.start(ServiceName.PREPOST, PrepostConfig, serve))
