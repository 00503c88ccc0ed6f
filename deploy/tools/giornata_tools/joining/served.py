"""The models that are served, as the routers tell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from giornata.bus.bus import Bus
from giornata.wire import subjects
from giornata.wire.cells import anywhere
from giornata.wire.fleet import FleetSummary
from giornata.wire.loras import LoraRecord
from giornata.wire.models import ModelCard


class Served:
    """What every cell serves. Used from one event loop; make it with :meth:`listening`."""

    def __init__(self) -> None:
        self._cells: dict[str, tuple[ModelCard, ...]] = {}
        self.news = asyncio.Event()
        """Set when the served models have changed; a task that waits for it clears it."""

    @classmethod
    @asynccontextmanager
    async def listening(cls, bus: Bus) -> AsyncIterator[Served]:
        """Hear the routers while inside."""
        served = cls()
        async with AsyncExitStack() as stack:
            for subject in anywhere(subjects.SUMMARY):
                await stack.enter_async_context(bus.listen(subject, FleetSummary, served.hear))
            yield served

    def hear(self, summary: FleetSummary) -> None:
        """Take in what a cell's router tells."""
        if self._cells.get(summary.cell) != summary.models:
            self._cells[summary.cell] = summary.models
            self.news.set()

    def card(self, record: LoraRecord) -> ModelCard | None:
        """The checkpoint that a LoRA is for; None while it is not served."""
        wanted = (record.model, record.canonical and record.canonical.model_digest)
        cards = (card for models in self._cells.values() for card in models)
        return next((card for card in cards if (card.name, card.digest) == wanted), None)
