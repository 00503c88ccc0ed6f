"""``python -m giornata_controlnet``: the composition root."""

from __future__ import annotations

import asyncio
import sys

from giornata import runtime
from giornata.wire.workers import ServiceName
from giornata_controlnet.config import ControlNetConfig


async def serve(config: ControlNetConfig, stop: asyncio.Event) -> None:
    """Read the cards, open NATS and blobs; compute ControlNets until `stop`; drain."""
    from giornata.blobs import open_blobs
    from giornata.bus.bus import connect_as
    from giornata.gpus import DeviceLedger, gpus_of
    from giornata.runtime import keep_freed
    from giornata_controlnet.resident_nets import ResidentControlNets, read_cards
    from giornata_controlnet.service import ControlNetService

    configured = await asyncio.to_thread(read_cards, config.controlnets)
    async with (
        gpus_of(ServiceName.CONTROLNET, config) as (own, gpus),
        connect_as(ServiceName.CONTROLNET, own) as bus,
        open_blobs(own.blobs_url) as blobs,
    ):
        if own.torch_device().type == "cpu":
            keep_freed()
        ledger = DeviceLedger(own.device_ledger, gpus[0].id if gpus else None, ServiceName.CONTROLNET)
        with ResidentControlNets(
            configured,
            own.torch_device(),
            own.torch_dtype(),
            budget_bytes=own.budget_bytes(ledger),
            loads=own.control_loads,
        ) as nets:
            await ControlNetService(own, bus, blobs, nets, gpus).run(stop)


if __name__ == "__main__":
    sys.exit(runtime.start(ServiceName.CONTROLNET, ControlNetConfig, serve))
