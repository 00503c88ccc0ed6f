"""The fleet as the active router tells it: a summary, which is heard all the time, and reports on demand."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Final

from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.fleet import SILENCE_S
from giornata.wire import codec, subjects
from giornata.wire.errors import GiornataError
from giornata.wire.fleet import FleetPage, FleetRequest, FleetSummary, InstanceReport, InstanceReports
from giornata.wire.models import ModelCard
from giornata.wire.workers import ServiceName
from giornata_gateway.views.catalog import NEEDED

KEPT_S: Final = 0.25
"""How long reports serve all requests of this gateway."""
ANSWER_MS: Final = 2000
"""How long an answer waits for reports."""


class FleetListener:
    """What is served, by the latest summary. It stays known while no router leads, since the next one soon does.

    The router may be away for `bridged_s` without being missed, since submissions are tried again meanwhile.
    """

    def __init__(self, bridged_s: float) -> None:
        self._bridged_s = max(bridged_s, SILENCE_S)
        self._summary: FleetSummary | None = None
        self._heard_s = -math.inf
        self._asking = asyncio.Lock()
        self._reports: list[InstanceReport] | None = None
        self._reported_s = -math.inf

    def hear(self, summary: FleetSummary) -> None:
        """Take in a summary of the router that leads."""
        self._summary, self._heard_s = summary, time.monotonic()

    def cards(self) -> dict[str, ModelCard]:
        """Served models by name."""
        return {card.name: card for card in self._summary.models} if self._summary else {}

    def missing(self) -> list[ServiceName]:
        """Services that an edit needs and that have no ready instance; the router alone where none leads.

        Without a router the others are unknown. A router that is being replaced is not missed.
        """
        if self._summary is None or time.monotonic() - self._heard_s >= self._bridged_s:
            return [ServiceName.ROUTER]
        ready = self._summary.ready
        return [name for name in NEEDED if name is not ServiceName.ROUTER and not ready.get(name)]

    def has_another(self, gateway: str) -> bool:
        """Whether a gateway other than `gateway` takes requests."""
        return self._summary is not None and any(name != gateway for name in self._summary.gateways)

    def nearly_full(self) -> tuple[str, ...]:
        """JetStream's streams that may soon take nothing more."""
        return self._summary.nearly_full if self._summary else ()

    async def reports(self, bus: Bus) -> list[InstanceReport] | None:
        """Every live instance; None where no router answers. Requests of the same moment share an answer."""
        async with self._asking:
            if time.monotonic() - self._reported_s > KEPT_S:
                self._reports, self._reported_s = await _reports(bus), time.monotonic()
            return self._reports


async def _reports(bus: Bus) -> list[InstanceReport] | None:
    deadline = Deadline.after_ms(ANSWER_MS)

    async def page(number: int) -> FleetPage:
        request = FleetRequest(page=number, remaining_ms=deadline.remaining_ms())
        return await bus.call(subjects.FLEET, request, FleetPage, deadline)

    try:
        first = await page(0)
        others = await asyncio.gather(*map(page, range(1, first.pages)))
    except GiornataError:
        return None
    read = (codec.decode(InstanceReports, one.packed).reports for one in (first, *others))
    found = {report.state.instance: report for reports in read for report in reports}
    return list(found.values())
