"""Who waits for which job to end: one subscription for all jobs of this gateway, futures for those who wait."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

import nats.errors
import structlog

from giornata import retries
from giornata.bus.bus import Bus
from giornata.records.jobs import Records
from giornata.wire import subjects
from giornata.wire.errors import GiornataError, JobNotFound, ServiceUnavailable
from giornata.wire.events import DoneEvent, EventKind
from giornata.wire.jobs import JobRecord

log = structlog.get_logger(__name__)

CHECK_WINDOW_S = 20.0
"""After a reconnect, how long the records are asked for until JetStream answers again."""


class Ended(Protocol):
    """Hears of every end of a job of this gateway, and whether somebody waited for it."""

    def __call__(self, event: DoneEvent, *, awaited: bool) -> None:
        """Take in an end."""


class Waiting:
    """Futures that resolve when a job is terminal; the record says how."""

    def __init__(self, records: Records, on_done: Ended) -> None:
        self._records = records
        self._on_done = on_done
        self._futures: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self._watchers: set[asyncio.Future[None]] = set()
        self._watchable = True

    @asynccontextmanager
    async def listening(self, bus: Bus, gateway: str) -> AsyncIterator[None]:
        """Hear the ends of `gateway`'s jobs while inside; after every reconnect look at the records too."""
        reconnected = asyncio.Event()
        bus.on_reconnect.append(reconnected.set)
        checker = asyncio.create_task(self._check_after_reconnects(reconnected), name="check-after-reconnect")
        try:
            async with bus.listen(subjects.events_of_gateway(gateway, EventKind.DONE), DoneEvent, self.hear):
                yield
        finally:
            bus.on_reconnect.remove(reconnected.set)
            checker.cancel()
            await asyncio.gather(checker, return_exceptions=True)

    def hear(self, event: DoneEvent) -> None:
        """Wake those who wait for the event's job."""
        self._on_done(event, awaited=event.job_id in self._futures)
        self.wake(event.job_id)

    @contextmanager
    def expect(self, job_id: str, *, watching: bool = False) -> Iterator[asyncio.Future[None]]:
        """A future that resolves when the job is terminal. Enter before the job can end.

        Args:
            job_id: names the job.
            watching: whether the caller only looks on and can go on doing so at another gateway.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures[job_id].add(future)
        if watching:
            self._watchers.add(future)
            if not self._watchable:
                self._leave(future)
        try:
            yield future
        finally:
            self._futures[job_id].discard(future)
            self._watchers.discard(future)
            if not self._futures[job_id]:
                del self._futures[job_id]
            if future.done() and not future.cancelled():
                future.exception()  # seen: whoever left early does not care

    def __len__(self) -> int:
        """Jobs that somebody waits for."""
        return len(self._futures)

    def abandon(self, *, watchers_only: bool = False) -> None:
        """Tell everybody who still waits that this gateway leaves; first those who only look on, now or from now on."""
        self._watchable = False
        for futures in self._futures.values():
            for future in self._watchers.intersection(futures) if watchers_only else futures:
                self._leave(future)

    @staticmethod
    def _leave(future: asyncio.Future[None]) -> None:
        if not future.done():
            future.set_exception(ServiceUnavailable("This gateway is shutting down.", retry_after_s=1))

    async def check(self) -> None:
        """Wake those whose job ended while nobody could tell us."""
        for job_id in list(self._futures):
            try:
                record = await self._read(job_id)
            except JobNotFound:
                continue  # not accepted yet
            if record.state.terminal:
                self.wake(job_id)

    async def _read(self, job_id: str) -> JobRecord:
        return await retries.patiently(nats.errors.Error, CHECK_WINDOW_S)(self._records.get, job_id)

    def wake(self, job_id: str) -> None:
        """Wake those who wait for a job: it has ended."""
        for future in self._futures.get(job_id, ()):
            if not future.done():
                future.set_result(None)

    async def _check_after_reconnects(self, reconnected: asyncio.Event) -> None:
        while True:
            await reconnected.wait()
            reconnected.clear()
            try:
                await self.check()
            except (GiornataError, nats.errors.Error):
                log.warning("check_after_reconnect_failed", exc_info=True)
