"""The fleet as the active router tells it: summaries, heard all the time, and reports on demand."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.fleet import SILENCE_S
from giornata.wire import codec, subjects
from giornata.wire.adapters import ControlCard
from giornata.wire.errors import GiornataError
from giornata.wire.messages import MaskCard
from giornata.wire.models import ModelCard, Task
from giornata.wire.workers import (
    FleetPage,
    FleetRequest,
    FleetSummary,
    InstanceReport,
    InstanceReports,
    ServiceName,
)
from giornata_gateway.views.catalog import NEEDED, choose_card

KEPT_S: Final = 0.25
"""How long reports serve all requests of this gateway."""
ANSWER_MS: Final = 2000
"""How long an answer waits for reports."""


class FleetListener:
    """A listener to the router's summaries of the fleet. The latest stays known while no router leads.

    A router may be away for `bridged_s` without being missed, since submissions are tried again meanwhile. Requests may
    call models by their `aliases`, too.
    """

    def __init__(self, bridged_s: float, aliases: Mapping[str, str] = MappingProxyType({})) -> None:
        self.aliases = aliases
        self._bridged_s = max(bridged_s, SILENCE_S)
        self.heard = asyncio.Event()
        """A router has told."""
        self._summary: FleetSummary | None = None
        """The latest, and when it came."""
        self._heard_s = -math.inf
        self._asking = asyncio.Lock()
        self._reports: list[InstanceReport] | None = None
        self._reported_s = -math.inf

    def hear(self, summary: FleetSummary) -> None:
        """Take in a summary of the router that leads."""
        self._summary, self._heard_s = summary, time.monotonic()
        self.heard.set()

    def cards(self) -> dict[str, ModelCard]:
        """Served models by name."""
        return {card.name: card for card in self._summary.models} if self._summary else {}

    def choose(self, name: str | None, task: Task = Task.EDIT) -> ModelCard:
        """The model that serves a request that names this one, or none; raises as :func:`choose_card`."""
        return choose_card(self.cards(), name, self.missing(), task, self.aliases)

    def controlnets(self) -> dict[str, tuple[ControlCard, ...]]:
        """ControlNets by model."""
        return self._summary.controlnets if self._summary else {}

    def masks(self) -> dict[str, MaskCard]:
        """Return what makes masks from words, by the model of its prepost."""
        return self._summary.masks if self._summary else {}

    def serves(self, model: str, digest: str) -> bool:
        """Return whether a model is served with this digest."""
        card = self.cards().get(model)
        return card is not None and card.digest == digest

    def waits_s(self) -> dict[str, float]:
        """About how long a picture would wait for a worker, by model; what is unknown is left out."""
        led = self._led()
        return {model: wait_ms / 1e3 for model, wait_ms in led.wait_ms.items()} if led else {}

    def missing(self) -> list[ServiceName]:
        """Services that an edit needs and that have no ready instance; the router where none leads.

        Without a router the others are unknown. A router that is being replaced is not missed.
        """
        led = self._led()
        if led is None:
            return [ServiceName.ROUTER]
        return [name for name in NEEDED if name is not ServiceName.ROUTER and not led.ready.get(name)]

    def has_another(self, gateway: str) -> bool:
        """Return whether a gateway other than `gateway` takes requests."""
        return self._summary is not None and any(name != gateway for name in self._summary.gateways)

    def nearly_full(self) -> tuple[str, ...]:
        """JetStream's streams that may soon take nothing more."""
        return self._summary.nearly_full if self._summary else ()

    async def reports(self, bus: Bus) -> list[InstanceReport] | None:
        """Every live instance; None where no router answers. Requests of the same moment share an answer."""
        async with self._asking:
            if time.monotonic() - self._reported_s > KEPT_S:
                self._reports = await _reports(bus)
                self._reported_s = time.monotonic()
            return self._reports

    def _led(self) -> FleetSummary | None:
        """The latest summary while a router leads, or is soon followed by one that does."""
        return self._summary if time.monotonic() - self._heard_s < self._bridged_s else None


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
    return [report for reports in read for report in reports]
