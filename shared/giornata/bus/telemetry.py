"""Telling the fleet the state of this instance a few times a second, and once more when it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import nats.errors
import structlog

from giornata import __version__
from giornata.bus.bus import Bus
from giornata.bus.connection import barrier
from giornata.config import ServiceConfig
from giornata.logs import LogSink
from giornata.wire import subjects
from giornata.wire.workers import ServiceName, ServiceState

Report = Callable[[], ServiceState]

RETOLD_S: Final = 5.0
"""How often a worker tells its blocks and what it has recorded though neither has changed: for a router that has just
started, and after a lost message. The list is always whole, so that the next one makes up for any that was lost.
"""

log = structlog.get_logger(__name__)


class TelemetryDeduplicator:
    """Leaves out of telemetry what was told lately and has not changed since: it is most of a worker's message."""

    def __init__(self) -> None:
        self._told: tuple[object, ...] | None = None
        self._told_s = -math.inf

    def spared(self, state: ServiceState, now: float) -> ServiceState:
        """Return what to tell of `state`. The order of recordings by use is no news."""
        worker = state.worker
        if worker is None or (worker.resident is None and worker.adapters_resident is None):
            return state
        resident = [
            {tier: frozenset(ids) for tier, ids in (here or {}).items()}
            for here in (worker.resident, worker.adapters_resident)
        ]
        telling = resident, worker.blocks
        if telling != self._told or now - self._told_s >= RETOLD_S:
            self._told, self._told_s = telling, now
            return state
        spared = {"resident": None, "adapters_resident": None, "blocks": None}
        return state.model_copy(update={"worker": worker.model_copy(update=spared)})


def state_of(service: ServiceName, config: ServiceConfig, **told: Any) -> ServiceState:
    """The state of an instance of this process; ready, unless `told`, fields that only it knows, says otherwise."""
    own = {
        "service": service,
        "instance": config.instance,
        "host": socket.gethostname(),
        "version": __version__,
        "log_lines_lost": LogSink.lost,
    }
    return ServiceState.model_validate(own | {"ready": True} | told)


@asynccontextmanager
async def telemetry(bus: Bus, hz: float, report: Report) -> AsyncIterator[None]:
    """Publish `report()` `hz` times a second while inside; on leaving, say that this instance is draining.

    A failure is logged, and the next state is sent all the same: silence would mean death. A worker's blocks, and
    what it has recorded, are sent when that changes, and every :data:`RETOLD_S`.
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
    sparing = TelemetryDeduplicator()
    while True:
        await _tell(bus, lambda: sparing.spared(report(), time.monotonic()))
        await asyncio.sleep(1 / hz)  # the rate of telemetry, not a poll


async def _tell(bus: Bus, report: Report) -> None:
    if not bus.client.is_connected:
        return
    try:
        await publish(bus, report())
    except Exception:  # the task's edge: logged
        log.exception("telemetry_failed")
