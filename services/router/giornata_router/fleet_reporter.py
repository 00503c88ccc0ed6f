"""Telling gateways of the fleet: the edge around :mod:`giornata_router.rules.reports`."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from typing import Final

import nats.errors
import structlog

from giornata.bus.bus import Bus
from giornata.fleet import Fleet
from giornata.wire import codec, subjects
from giornata.wire.errors import MalformedMessage
from giornata.wire.fleet import FleetPage, FleetRequest, FleetSummary, InstanceReports
from giornata.wire.workers import ServiceState
from giornata_router.leadership import Leadership
from giornata_router.rules.reports import StepRates, report, summary

PERIOD_S: Final = 0.25
"""Least time between two summaries."""
HEARTBEAT_S: Final = 1.0
"""Time after which an unchanged summary is told again."""
KEPT_S: Final = 0.5
"""How long the pages of reports serve everyone who asks."""
PAGE: Final = 100
"""Instances of a page: it stays well below the limit of a control message."""

log = structlog.get_logger(__name__)


class FleetReporter:
    """The active router's reports of its fleet; a standby only listens."""

    def __init__(self, bus: Bus, fleet: Fleet, instance: str) -> None:
        self._bus, self._fleet, self._instance = bus, fleet, instance
        self._rates = StepRates()
        self._pages: list[bytes] = []
        self._paged_s = -math.inf

    def observe(self, state: ServiceState, now: float) -> None:
        """Take in telemetry that the fleet has taken in."""
        self._rates.observe(state, now)

    def look(self) -> None:
        """Forget workers that are gone."""
        self._rates.keep({state.instance for state in self._fleet.all()})

    async def tell(self, leadership: Leadership, waits: Callable[[], Mapping[str, float]]) -> None:
        """Publish the summary on change and every second, for ever, but not once the lease has ended.

        `waits` tells how long a picture would wait, in milliseconds, by model.
        """
        told: FleetSummary | None = None
        told_s = -math.inf
        while True:
            now = time.monotonic()
            present = summary(self._instance, self._fleet.all(), waits())
            if leadership.leads and (present != told or now - told_s >= HEARTBEAT_S):
                try:
                    await self._bus.publish(subjects.SUMMARY, present)
                    told, told_s = present, now
                except nats.errors.Error as error:
                    log.warning("summary_not_published", error=repr(error))
            await asyncio.sleep(PERIOD_S)  # the rate of the summary, not a poll

    async def page(self, request: FleetRequest) -> FleetPage:
        """Endpoint ``giornata.router.fleet``.

        Raises:
            MalformedMessage: there is no such page.
        """
        now = time.monotonic()
        if now - self._paged_s > KEPT_S:
            reports = [report(state, self._rates, now) for state in self._fleet.all()]
            self._pages = [
                codec.encode(InstanceReports(reports=tuple(reports[first : first + PAGE])))
                for first in range(0, max(1, len(reports)), PAGE)
            ]
            self._paged_s = now
        if not 0 <= request.page < len(self._pages):
            raise MalformedMessage(received=request.page, accepted=f"a page from 0 to {len(self._pages) - 1}")
        return FleetPage(pages=len(self._pages), packed=self._pages[request.page])
