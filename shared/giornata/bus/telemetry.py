"""Telling the fleet the state of this instance a few times a second, and once more when it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import nats.errors
import structlog

from giornata import __version__
from giornata.bus.bus import Bus
from giornata.bus.connection import barrier
from giornata.wire import subjects
from giornata.wire.workers import ServiceName, ServiceState

Report = Callable[[], ServiceState]

log = structlog.get_logger(__name__)


def state_of(service: ServiceName, instance: str, **told: Any) -> ServiceState:
    """The state of an instance of this process; ready, unless `told`, fields that only it knows, says otherwise."""
    own = {"service": service, "instance": instance, "host": socket.gethostname(), "version": __version__}
    return ServiceState.model_validate(own | {"ready": True} | told)


@asynccontextmanager
async def telemetry(bus: Bus, hz: float, report: Report) -> AsyncIterator[None]:
    """Publish `report()` `hz` times a second while inside; on leaving, say that this instance is draining.

    A failure is logged, and the next state is sent all the same: silence would mean death.
    """
    task = asyncio.create_task(_publish(bus, hz, report), name="telemetry")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await _tell(bus, lambda: report().model_copy(update={"ready": False, "draining": True}))
        if bus.client.is_connected:
            with contextlib.suppress(nats.errors.Error):
                await barrier(bus.client)


async def publish(bus: Bus, state: ServiceState) -> None:
    """Send one state at once, for a change that others should not wait for."""
    await bus.publish(subjects.telemetry(state.service, state.instance), state)


async def _publish(bus: Bus, hz: float, report: Report) -> None:
    while True:
        await _tell(bus, report)
        await asyncio.sleep(1 / hz)  # the rate of telemetry, not a poll


async def _tell(bus: Bus, report: Report) -> None:
    if not bus.client.is_connected:
        return
    try:
        await publish(bus, report())
    except Exception:  # the task's edge: logged
        log.exception("telemetry_failed")
