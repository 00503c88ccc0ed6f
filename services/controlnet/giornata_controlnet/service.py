"""Endpoint and telemetry of one ControlNet instance."""

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
    state = state_of(ServiceName.CONTROLNET, config.instance)
    endpoint = Endpoint(subjects.controlnet("residuals"), AdapterRequest, residuals)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(bus.serve("controlnet", endpoint, instance=config.instance))
        await stack.enter_async_context(telemetry(bus, config.telemetry_hz, lambda: state))
        log.info("ready", subject=endpoint.subject)
        await stop.wait()
        log.info("draining")
    log.info("drained")


async def residuals(request: AdapterRequest) -> NoReturn:
    """Residuals of a ControlNet for one step.

    Raises:
        NotSupported: always, for now.
    """
    raise NotSupported(
        "ControlNet residuals are not computed yet.",
        field="adapter",
        received=request.adapter,
        accepted="an edit without a ControlNet",
    )
