"""The fleet as the active router of each cell tells it: summaries, heard all the time, and reports on demand."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.fleet import SILENCE_S
from giornata.wire import codec, subjects
from giornata.wire.adapters import ControlCard
from giornata.wire.cells import in_cell
from giornata.wire.errors import GiornataError
from giornata.wire.fleet import FleetPage, FleetRequest, FleetSummary, InstanceReport, InstanceReports
from giornata.wire.masks import MaskCard
from giornata.wire.models import ModelCard, Task
from giornata.wire.workers import ServiceName
from giornata_gateway.views.catalog import NEEDED, choose_card

KEPT_S: Final = 0.25
"""How long reports serve all requests of this gateway."""
ANSWER_MS: Final = 2000
"""How long an answer waits for reports."""
FORGOTTEN_S: Final = 600.0
"""A cell that was silent for so long is no more."""


class Heard(NamedTuple):
    """The latest summary of a cell, and when it came."""

    summary: FleetSummary
    at_s: float

    @property
    def missing(self) -> list[ServiceName]:
        """Services that an edit needs and that have no ready instance, but for the router."""
        ready = self.summary.ready
        return [name for name in NEEDED if name is not ServiceName.ROUTER and not ready.get(name)]


class PredictedWait(NamedTuple):
    """How long a picture of a model would wait for a worker of a cell."""

    cell: str
    model: str
    wait_s: float


class FleetListener:
    """What is served, by the latest summary of each cell. It stays known while no router leads, since one soon does.

    A router may be away for `bridged_s` without being missed, since submissions are tried again meanwhile. Requests may
    call models by their `aliases`, too.
    """

    def __init__(self, bridged_s: float, aliases: Mapping[str, str] = MappingProxyType({})) -> None:
        self.aliases = aliases
        self._bridged_s = max(bridged_s, SILENCE_S)
        self.heard = asyncio.Event()
        """A router has told of a cell."""
        self._cells: dict[str, Heard] = {}
        self._asking = asyncio.Lock()
        self._reports: list[InstanceReport] | None = None
        self._reported_s = -math.inf

    def hear(self, summary: FleetSummary) -> None:
        """Take in a summary of the router that leads a cell. A new cell needs no more than that."""
        now = time.monotonic()
        self._cells[summary.cell] = Heard(summary, now)
        for cell in [cell for cell, heard in self._cells.items() if now - heard.at_s > FORGOTTEN_S]:
            del self._cells[cell]
        self.heard.set()

    def cells(self) -> Iterable[str]:
        """The cells that were heard, also those without a router at the moment."""
        return self._cells.keys()

    def cards(self) -> dict[str, ModelCard]:
        """Served models by name. Where cells differ, that of the first cell by name."""
        cells = sorted(self._known(), key=lambda heard: heard.summary.cell, reverse=True)
        return {card.name: card for heard in cells for card in heard.summary.models}

    def choose(self, name: str | None, task: Task = Task.EDIT) -> ModelCard:
        """The model that serves a request that names this one, or none; raises as :func:`choose_card`."""
        return choose_card(self.cards(), name, self.missing(), task, self.aliases)

    def controlnets(self) -> dict[str, tuple[ControlCard, ...]]:
        """ControlNets by model. Where cells differ in a model's, those of the first cell by name that has any."""
        cells = sorted(self._known(), key=lambda heard: heard.summary.cell, reverse=True)
        return {model: nets for heard in cells for model, nets in heard.summary.controlnets.items()}

    def masks(self) -> dict[str, MaskCard]:
        """What makes masks from words, by the model of its prepost. Where cells differ, that of the first by name."""
        cells = sorted(self._known(), key=lambda heard: heard.summary.cell, reverse=True)
        return {model: card for heard in cells for model, card in heard.summary.masks.items()}

    def mask_cells(self, model: str) -> list[str]:
        """The cells with a prepost of this model that makes masks from words."""
        return [heard.summary.cell for heard in self._known() if model in heard.summary.masks]

    def waits_ms(self, model: str, digest: str) -> dict[str, float | None]:
        """The cells that serve a model, with about how long a picture would wait there; None: unknown."""
        return {
            heard.summary.cell: heard.summary.wait_ms.get(model)
            for heard in self._known()
            if any((card.name, card.digest) == (model, digest) for card in heard.summary.models)
        }

    def predicted_waits(self) -> list[PredictedWait]:
        """About how long a picture would wait for a worker, by cell and model; what is unknown is left out."""
        return [
            PredictedWait(heard.summary.cell, model, wait_ms / 1e3)
            for heard in self._led()
            for model, wait_ms in heard.summary.wait_ms.items()
        ]

    def missing(self) -> list[ServiceName]:
        """Services that an edit needs and that have no ready instance in the best cell; the router where none leads.

        Without a router the others are unknown. A router that is being replaced is not missed.
        """
        lacks = [heard.missing for heard in self._led()]
        return min(lacks, key=len) if lacks else [ServiceName.ROUTER]

    def has_another(self, gateway: str) -> bool:
        """Whether a gateway other than `gateway` takes requests."""
        told = (name for heard in self._cells.values() for name in heard.summary.gateways)
        return any(name != gateway for name in told)

    def nearly_full(self) -> tuple[str, ...]:
        """JetStream's streams that may soon take nothing more."""
        told = (name for heard in self._known() for name in heard.summary.nearly_full)
        return tuple(dict.fromkeys(told))

    async def reports(self, bus: Bus) -> list[InstanceReport] | None:
        """Every live instance; None where no router answers. Requests of the same moment share an answer."""
        async with self._asking:
            if time.monotonic() - self._reported_s > KEPT_S:
                cells = [heard.summary.cell for heard in self._known()]
                told = await asyncio.gather(*(_reports(bus, cell) for cell in cells))
                answers = [reports for reports in told if reports is not None]
                found = {report.state.instance: report for reports in answers for report in reports}
                self._reports = list(found.values()) if answers else None
                self._reported_s = time.monotonic()
            return self._reports

    def _led(self) -> Iterator[Heard]:
        now = time.monotonic()
        return (heard for heard in self._cells.values() if now - heard.at_s < self._bridged_s)

    def _known(self) -> list[Heard]:
        """The cells with a router, else all that are known: one of them soon has its next one."""
        return list(self._led()) or list(self._cells.values())


async def _reports(bus: Bus, cell: str) -> list[InstanceReport] | None:
    deadline = Deadline.after_ms(ANSWER_MS)

    async def page(number: int) -> FleetPage:
        request = FleetRequest(page=number, remaining_ms=deadline.remaining_ms())
        return await bus.call(in_cell(subjects.FLEET, cell), request, FleetPage, deadline)

    try:
        first = await page(0)
        others = await asyncio.gather(*map(page, range(1, first.pages)))
    except GiornataError:
        return None
    read = (codec.decode(InstanceReports, one.packed).reports for one in (first, *others))
    return [report for reports in read for report in reports]
