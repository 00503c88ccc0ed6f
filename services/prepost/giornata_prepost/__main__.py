"""``python -m giornata_prepost``: the composition root.

The processes of the image pool import this module too. It imports the rest in :func:`main`, so that they load no torch.
"""

import sys


def main() -> int:
    """Exit status of the process: configure; open NATS, blobs, image processes, model; serve; drain."""
    import asyncio  # noqa: PLC0415 - see the module's docstring, here and below

    from giornata import runtime  # noqa: PLC0415
    from giornata.wire.workers import ServiceName  # noqa: PLC0415
    from giornata_prepost.config import PrepostConfig  # noqa: PLC0415

    async def serve(config: PrepostConfig, stop: asyncio.Event) -> None:
        from giornata.blobs import RedisBlobs  # noqa: PLC0415
        from giornata.bus.bus import connect_as  # noqa: PLC0415
        from giornata_prepost.checkpoint import open_model  # noqa: PLC0415
        from giornata_prepost.service import Prepost  # noqa: PLC0415
        from giornata_prepost.work.pool import ImagePool  # noqa: PLC0415

        async with (
            connect_as(ServiceName.PREPOST, config) as bus,
            RedisBlobs.open(config.redis_url) as blobs,
            ImagePool(config.image_processes) as pool,
        ):
            model = await asyncio.to_thread(open_model, config)
            await Prepost(config, blobs, pool, model).run(bus, stop)

    return runtime.start(ServiceName.PREPOST, PrepostConfig, serve)


if __name__ == "__main__":
    sys.exit(main())
