"""``python -m giornata_controlnet``: the composition root, and one endpoint, which refuses for now.

The service is discovered, watched and drained like every other one.
"""

from __future__ import annotations

import asyncio
import sys
from typing import NoReturn

from giornata import runtime
from giornata.bus.answering import Endpoint
from giornata.config import CellConfig
from giornata.wire import subjects
from giornata.wire.controlnets import OpenControl
from giornata.wire.errors import NotSupported
from giornata.wire.workers import ServiceName


async def open_row(request: OpenControl) -> NoReturn:
    """Keep what the steps of a row share; always raises NotSupported."""
    raise NotSupported(
        "This service computes no ControlNets yet.",
        field="controlnets",
        received=", ".join(use.model for use in request.job.controls),
        accepted="a request without ControlNets",
    )


async def main(config: CellConfig, stop: asyncio.Event) -> None:
    """Answer until `stop`."""
    endpoint = Endpoint(subjects.controlnet(config.instance, "open"), OpenControl, open_row)
    await runtime.serve_stateless(ServiceName.CONTROLNET, [endpoint], config, stop)


if __name__ == "__main__":
    sys.exit(runtime.start(ServiceName.CONTROLNET, CellConfig, main))
