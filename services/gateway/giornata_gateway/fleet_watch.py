"""The fleet as this gateway hears it: telemetry into :class:`giornata.fleet.Fleet`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from giornata import subjects
from giornata.bus import Bus
from giornata.fleet import Fleet
from giornata.models import ModelCard
from giornata.workers import ServiceName, ServiceState
from giornata_gateway.catalog import NEEDED


class FleetWatch:
    """Live instances and what they serve; whoever has been silent is forgotten before every answer."""

    def __init__(self) -> None:
        self._fleet = Fleet()

    def hear(self, state: ServiceState) -> None:
        """Take in one telemetry message."""
        self._fleet.observe(state, time.monotonic())

    @asynccontextmanager
    async def listening(self, bus: Bus) -> AsyncIterator[None]:
        """Hear telemetry while inside."""
        async with bus.listen(subjects.ALL_TELEMETRY, ServiceState, self.hear):
            yield

    def states(self) -> list[ServiceState]:
        """Every live instance."""
        return self._present().all()

    def cards(self) -> dict[str, ModelCard]:
        """Served models by name."""
        return self._present().cards()

    def missing(self) -> list[ServiceName]:
        """Services that an edit needs and that have no ready instance."""
        return self._present().missing(NEEDED)

    def _present(self) -> Fleet:
        self._fleet.expire(time.monotonic())
        return self._fleet
