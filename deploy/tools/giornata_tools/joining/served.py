"""The models that are served, as the router tells."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from giornata.bus.bus import Bus
from giornata.wire import subjects
from giornata.wire.fleet import FleetSummary
from giornata.wire.loras import LoraRecord
from giornata.wire.models import ModelCard


class ServedModels:
    """The models that are served. Used from one event loop; make it with :meth:`listening`."""

    def __init__(self) -> None:
        self._cards: tuple[ModelCard, ...] = ()
        self.news = asyncio.Event()
        """Set when the served models have changed; a task that waits for it clears it."""

    @classmethod
    @asynccontextmanager
    async def listening(cls, bus: Bus) -> AsyncIterator[ServedModels]:
        """Hear the router while inside."""
        served = cls()
        async with bus.listen(subjects.SUMMARY, FleetSummary, served.hear):
            yield served

    def hear(self, summary: FleetSummary) -> None:
        """Take in what the router tells."""
        if self._cards != summary.models:
            self._cards = summary.models
            self.news.set()

    def card(self, record: LoraRecord) -> ModelCard | None:
        """The checkpoint that a LoRA is for; None while it is not served."""
        wanted = (record.model, record.canonical and record.canonical.model_digest)
        return next((card for card in self._cards if (card.name, card.digest) == wanted), None)
