"""In the background: every LoRA that was not profiled yet, one after the other, as soon as its model is served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

import nats.errors

from giornata.cancellation import heed_cancel
from giornata.tenant_records import LoraRecords
from giornata.wire.errors import DeadlineExceeded, GiornataError, ModelNotFound, ServiceUnavailable
from giornata.wire.loras import LoraRecord, LoraState
from giornata.wire.models import ModelCard
from giornata_tools.joining.profiler import Done, LoraProfile, LoraProfiler
from giornata_tools.joining.served import ServedModels

RETRY_S: Final = 60.0
"""After how long a LoRA comes again that could not be profiled for a reason that passes."""

Begin = Callable[[LoraRecord], Done]
"""Is told of a LoRA that is profiled now; what it returns is told of its edits."""


@dataclass
class LoraProfileWatcher:
    """The LoRAs that wait. Used from one event loop; run :meth:`run` once."""

    records: LoraRecords
    profiler: LoraProfiler
    served: ServedModels
    begin: Begin
    ended: Callable[[LoraRecord, LoraProfile | GiornataError], None]
    """Is told what became of it."""
    retry_s: float = RETRY_S
    _waiting: dict[str, LoraRecord] = field(default_factory=dict)
    """By key."""
    _not_before_s: dict[str, float] = field(default_factory=dict)
    """When those may come again that could not be profiled, on the monotonic clock."""

    async def run(self) -> None:
        """Profile what waits and what comes. It never returns.

        Raises:
            ServiceUnavailable: the records can be followed no more.
        """
        try:
            await self._run()
        except ExceptionGroup as group:
            lost, rest = group.split(nats.errors.Error)
            if lost is None or rest is not None:
                raise
            raise ServiceUnavailable(
                f"The records of LoRAs cannot be followed: {lost.exceptions[0]}."
            ) from lost

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(), name="follow-loras")
            while True:
                heed_cancel()
                key, record, card = await self._next()
                outcome = await self._outcome(record, card)
                again = isinstance(outcome, GiornataError) and _passes(outcome)
                if self._waiting.get(key) == record and not again:
                    del self._waiting[key]
                if again:
                    self._postpone(key)
                self.ended(record, outcome)

    async def _follow(self) -> None:
        """Keep what waits up to date with the records."""
        async with aclosing(self.records.bucket.changes(">")) as changes:
            async for key, record in changes:
                self._not_before_s.pop(key, None)
                if record is not None and is_due(record):
                    self._waiting[key] = record
                    self.served.news.set()
                else:
                    self._waiting.pop(key, None)

    async def _next(self) -> tuple[str, LoraRecord, ModelCard]:
        """The oldest LoRA whose turn it is and whose model is served, as soon as there is one."""
        while True:
            self.served.news.clear()
            now_s = time.monotonic()
            for key, record in sorted(self._waiting.items(), key=lambda item: item[1].created_s):
                card = self.served.card(record)
                if card is not None and self._not_before_s.get(key, 0.0) <= now_s:
                    return key, record, card
            await self.served.news.wait()

    async def _outcome(self, record: LoraRecord, card: ModelCard) -> LoraProfile | GiornataError:
        try:
            return await self.profiler.profile(record, card, self.begin(record))
        except GiornataError as error:
            return error

    def _postpone(self, key: str) -> None:
        self._not_before_s[key] = time.monotonic() + self.retry_s
        asyncio.get_running_loop().call_later(self.retry_s, self.served.news.set)


def is_due(record: LoraRecord) -> bool:
    """Whether a LoRA can be used and was not profiled yet."""
    return record.state is LoraState.READY and record.canonical is not None and record.joins_within is None


def _passes(error: GiornataError) -> bool:
    """Whether an error says nothing of the LoRA: what it needs is away."""
    return error.retryable or isinstance(error, ModelNotFound | DeadlineExceeded)
