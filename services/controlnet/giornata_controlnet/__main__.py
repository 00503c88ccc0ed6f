"""Composition root: ``python -m giornata_controlnet --help``."""

from __future__ import annotations

import asyncio
import sys
from functools import partial

from giornata import runtime
from giornata.bus import bus
from giornata.config import ServiceConfig, load
from giornata.wire.permissions import User
from giornata_controlnet import service


async def run(config: ServiceConfig, stop: asyncio.Event) -> None:
    """Connect, serve until `stop`, drain."""
    async with bus.connect(
        config.nats_url, config.instance, user=User.CONTROLNET, password_file=config.nats_password_file
    ) as connected:
        await service.serve(connected, config, stop)


def main() -> int:
    """Exit status of the process."""
    config = load(ServiceConfig, "controlnet")
    return runtime.run(partial(run, config), config)


if __name__ == "__main__":
    sys.exit(main())
