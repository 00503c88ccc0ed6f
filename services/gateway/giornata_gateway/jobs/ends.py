"""The ends of jobs: one subscription for all jobs of this gateway, and a future for each request that waits."""

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
from giornata.records import Records
from giornata.wire import subjects
from giornata.wire.errors import GiornataError, JobNotFound, ServiceUnavailable
from giornata.wire.events import DoneEvent, EventKind
from giornata.wire.jobs import JobRecord

log = structlog.get_logger(__name__)

CHECK_WINDOW_S = 20.0
"""After a reconnect, how long the records are asked for until JetStream answers again."""


class EndListener(Protocol):
    """Hears every end of a job of this gateway, and whether a request waited for it."""

    def __call__(self, event: DoneEvent, *, awaited: bool) -> None:
        """Take in an end."""


class JobEnds:
    """Futures that resolve when a job is terminal; the record says how."""

    def __init__(self, records: Records, on_done: EndListener) -> None:
        self._records = records
        self._on_done = on_done
        self._futures: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self._watchers: set[asyncio.Future[None]] = set()
        self._watchable = True

    @asynccontextmanager
    async def listening(self, bus: Bus, gateway: str) -> AsyncIterator[None]:
        """Hear the ends of `gateway`'s jobs while inside, and read the records too after every reconnect."""
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
        """Wake the requests that wait for the event's job."""
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
                future.exception()  # seen: a request that left early does not read it

    def __len__(self) -> int:
        """Jobs that a request waits for."""
        return len(self._futures)

    def abandon(self, *, watchers_only: bool = False) -> None:
        """Tell every waiting request that this gateway leaves, or those alone that look on, now or later."""
        self._watchable = False
        for futures in self._futures.values():
            for future in self._watchers.intersection(futures) if watchers_only else futures:
                self._leave(future)

    @staticmethod
    def _leave(future: asyncio.Future[None]) -> None:
        if not future.done():
            future.set_exception(ServiceUnavailable("This gateway is shutting down.", retry_after_s=1))

    def wake(self, job_id: str) -> None:
        """Wake the requests that wait for a job: it has ended."""
        for future in self._futures.get(job_id, ()):
            if not future.done():
                future.set_result(None)

    async def _check_after_reconnects(self, reconnected: asyncio.Event) -> None:
        while True:
            await reconnected.wait()
            reconnected.clear()
            try:
                await self._check()
            except (GiornataError, nats.errors.Error):
                log.warning("check_after_reconnect_failed", exc_info=True)

    async def _check(self) -> None:
        """Wake the requests whose job ended while its event could not be heard."""
        asking = retries.patiently(nats.errors.Error, CHECK_WINDOW_S)
        for job_id in list(self._futures):
            try:
                record: JobRecord = await asking(self._records.get, job_id)
            except JobNotFound:
                continue  # not accepted yet
            if record.state.terminal:
                self.wake(job_id)
