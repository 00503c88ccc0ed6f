"""Jobs as records, router and events tell of them: their state, a forecast, their end."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import nats.errors
import structlog
from nats.js.errors import NotFoundError

from giornata import retries
from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.records import Change, JobRecordStore
from giornata.wire import subjects
from giornata.wire.errors import GiornataError, JobNotFound, ServiceUnavailable
from giornata.wire.jobs import JobRecord
from giornata.wire.messages import CancelRows, DoneEvent, JobEstimate, JobEstimateRequest

log = structlog.get_logger(__name__)

FORECAST_MS = 500
"""How long an answer waits for the router's forecast."""
CHECK_WINDOW_S = 20.0
"""After a reconnect, how long the records are asked for until JetStream answers again."""


class JobLedger:
    """The jobs of all gateways, as their records tell. None is known before a router has made the records' bucket."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._records: JobRecordStore | None = None
        self._opening = asyncio.Lock()

    async def get(self, job_id: str) -> JobRecord:
        """A job's record; an unknown id raises JobNotFound."""
        return await self._asked(job_id, lambda records: records.get(job_id))

    async def change(self, job_id: str, change: Change[JobRecord]) -> JobRecord:
        """Change a record as in every bucket; JobNotFound as :meth:`get`."""
        return await self._asked(job_id, lambda records: records.change(job_id, change))

    async def _asked(self, job_id: str, ask: Callable[[JobRecordStore], Awaitable[JobRecord]]) -> JobRecord:
        try:
            async with self._opening:
                self._records = self._records or await JobRecordStore.open(self._bus.jetstream)
            return await ask(self._records)
        except NotFoundError as error:
            raise JobNotFound(received=job_id) from error

    async def read_of(self, tenant: str, job_id: str) -> JobRecord:
        """The record of a tenant's job; JobNotFound, too, where it is another tenant's, which is not told."""
        try:
            subjects.token(job_id)
        except ValueError as error:
            raise JobNotFound(received=job_id) from error
        record = await self.get(job_id)
        if record.job.tenant != tenant:
            raise JobNotFound(received=job_id)
        return record

    async def forecast(self, job_id: str) -> JobEstimate | None:
        """Return when a job should have its pictures; None where the router does not know or does not answer."""
        deadline = Deadline.after_ms(FORECAST_MS)
        request = JobEstimateRequest(job_id=job_id, remaining_ms=deadline.remaining_ms())
        try:
            return await self._bus.call(subjects.FORECAST, request, JobEstimate, deadline)
        except GiornataError as error:
            log.debug("no_estimate", job_id=job_id, error=str(error))
            return None

    async def cancel(self, job_id: str) -> JobRecord:
        """Ask for a job's end, in the record and by broadcast; a terminal job stays as it is. Raises JobNotFound."""
        record = await self.change(job_id, lambda record: record.model_copy(update={"cancel": True}))
        if not record.state.terminal:
            await self._bus.publish(subjects.cancel(job_id), CancelRows(job_id=job_id, attempt=0))
            log.info("cancel_requested", job_id=job_id)
        return record


class JobEnds:
    """Futures that resolve when a job is terminal; the record says how. `on_done` hears every end."""

    def __init__(self, ledger: JobLedger, on_done: Callable[[DoneEvent], None]) -> None:
        self._ledger, self._on_done = ledger, on_done
        self._futures: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self._watchers: set[asyncio.Future[None]] = set()
        self._watchable = True

    def hear(self, event: DoneEvent) -> None:
        """Wake the requests that wait for the event's job."""
        self._on_done(event)
        self.wake(event.job_id)

    @contextmanager
    def expect(self, job_id: str, *, watching: bool = False) -> Iterator[asyncio.Future[None]]:
        """A future that resolves when the job is terminal. Enter before the job can end.

        A caller that is `watching` only looks on and can go on doing so at another gateway.
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

    def __contains__(self, job_id: str) -> bool:
        """Return whether a request waits for the job."""
        return job_id in self._futures

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

    async def check(self) -> None:
        """Wake the requests whose job ended while its event could not be heard."""
        asking = retries.patiently(nats.errors.Error, CHECK_WINDOW_S)
        for job_id in list(self._futures):
            try:
                record: JobRecord = await asking(self._ledger.get, job_id)
            except JobNotFound:
                continue  # not accepted yet
            if record.state.terminal:
                self.wake(job_id)
