"""Endpoint and telemetry of one LoRA store instance."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import NoReturn

import structlog

from giornata.bus.bus import Bus, Endpoint
from giornata.bus.telemetry import state_of, telemetry
from giornata.config import ServiceConfig
from giornata.wire import subjects
from giornata.wire.errors import NotSupported
from giornata.wire.messages import AdapterRequest
from giornata.wire.workers import ServiceName

log = structlog.get_logger(__name__)


async def serve(bus: Bus, config: ServiceConfig, stop: asyncio.Event) -> None:
    """Answer and tell of this instance until `stop`; then say *draining* and finish what was delivered."""
    state = state_of(ServiceName.LORA_STORE, config.instance)
    endpoint = Endpoint(subjects.lora("load"), AdapterRequest, load)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(bus.serve("lora-store", endpoint, instance=config.instance))
        await stack.enter_async_context(telemetry(bus, config.telemetry_hz, lambda: state))
        log.info("ready", subject=endpoint.subject)
        await stop.wait()
        log.info("draining")
    log.info("drained")


async def load(request: AdapterRequest) -> NoReturn:
    """Bring a LoRA to the denoisers of this host.

    Raises:
        NotSupported: always, for now.
    """
    raise NotSupported(
        "LoRA adapters are not loaded yet.",
        field="adapter",
        received=request.adapter,
        accepted="an edit without a LoRA",
    )
