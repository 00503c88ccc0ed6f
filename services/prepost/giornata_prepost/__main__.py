"""``python -m giornata_prepost``: the composition root.

The processes of the image pool import this module anew, so its imports wait in :func:`main`: no torch in
them.
"""

import sys


def main() -> int:
    """Exit status of the process: configure; open NATS, blobs, image processes, model; serve; drain."""
    import asyncio  # noqa: PLC0415 - see the module's docstring, here and below
    from functools import partial  # noqa: PLC0415

    from giornata import runtime  # noqa: PLC0415
    from giornata.config import load  # noqa: PLC0415
    from giornata_prepost.config import PrepostConfig  # noqa: PLC0415

    async def serve(config: PrepostConfig, stop: asyncio.Event) -> None:
        from giornata.blobs import RedisBlobs  # noqa: PLC0415
        from giornata.bus import bus  # noqa: PLC0415
        from giornata.wire.permissions import User  # noqa: PLC0415
        from giornata_prepost.checkpoint import open_model  # noqa: PLC0415
        from giornata_prepost.service import Prepost  # noqa: PLC0415
        from giornata_prepost.work.pool import ImagePool  # noqa: PLC0415

        async with (
            bus.connect(
                config.nats_url, config.instance, user=User.PREPOST, password_file=config.nats_password_file
            ) as connected,
            RedisBlobs.open(config.redis_url) as blobs,
            ImagePool(config.image_processes) as pool,
        ):
            model = await asyncio.to_thread(open_model, config)
            await Prepost(config, blobs, pool, model).run(connected, stop)

    prepost_config = load(PrepostConfig, "prepost")
    return runtime.run(partial(serve, prepost_config), prepost_config)


if __name__ == "__main__":
    sys.exit(main())
