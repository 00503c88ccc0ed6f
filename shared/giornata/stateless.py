"""A service that answers on its endpoints and keeps nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import structlog

from giornata.bus.bus import Endpoint, connect_as
from giornata.bus.telemetry import state_of, telemetry
from giornata.config import ServiceConfig
from giornata.wire.workers import ServiceName

log = structlog.get_logger(__name__)


async def serve(
    service: ServiceName, endpoints: Sequence[Endpoint], config: ServiceConfig, stop: asyncio.Event
) -> None:
    """Answer on `endpoints` and tell of this instance until `stop`; then say *draining* and finish what is there."""
    state = state_of(service, config.instance)
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(connect_as(service, config))
        await stack.enter_async_context(bus.serve(service, *endpoints, instance=config.instance))
        await stack.enter_async_context(telemetry(bus, config.telemetry_hz, lambda: state))
        log.info("ready", subjects=[endpoint.subject for endpoint in endpoints])
        await stop.wait()
        log.info("draining")
    log.info("drained")
