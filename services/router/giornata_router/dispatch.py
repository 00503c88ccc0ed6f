"""Handing rows to workers and hearing what became of them: the edge around :mod:`giornata.scheduling`."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from enum import Enum
from typing import Final

from giornata.scheduling.demand import JobDemand
from giornata.scheduling.placement import Placement
from giornata.scheduling.queue import Key, RowQueue, SchedulingParams
from giornata.scheduling.scheduler import Scheduler, find_yielding_attempt, likely_worker
from giornata.scheduling.worker_state import Attempt
from giornata.wire.jobs import Assignment
from giornata.wire.messages import DenoisedEvent
from giornata.wire.workers import ServiceState

SHARES_S: Final = 0.25
"""Least time between two checks for rows that have to give way to another tenant's."""


class NoReport(Enum):
    """Why the report of an attempt is no longer waited for."""

    LOST = "the worker fell silent"
    UNLISTED = "the worker does not know the rows"
    STALLED = "the worker's step did not end"
    PREEMPTED = "other rows come first"
    RECHECK = "reports may have been missed while disconnected"


Outcome = DenoisedEvent | NoReport


class PendingRows:
    """Rows of one job in the line, and what was decided about them that the job has not taken yet."""

    def __init__(self, rows: Sequence[int], numbers: Iterator[int], claim: SchedulingParams) -> None:
        self.claim = claim
        self.left = list(rows)
        """Rows that have no worker."""
        self.placed: list[Assignment] = []
        """Assignments that the job has not taken."""
        self.likely: list[str] = []
        """Workers that the job has to tell to load what it needs, since they probably get rows."""
        self._numbers = numbers
        self._news = asyncio.Event()

    def give(self, worker: str, rows: Sequence[int]) -> Assignment:
        """Assign `rows` to `worker`, as an attempt of their own."""
        given = Assignment(next(self._numbers), worker, tuple(rows))
        self.left = [row for row in self.left if row not in rows]
        self.placed.append(given)
        self._news.set()
        return given

    def load(self, worker: str) -> None:
        """Have `worker` told to load."""
        self.likely.append(worker)
        self._news.set()

    async def news(self) -> tuple[list[Assignment], list[str]]:
        """Take the assignments made, and the likely workers found, since the last call; waits for some."""
        await self._news.wait()
        self._news.clear()
        taken = self.placed, self.likely
        self.placed, self.likely = [], []
        return taken


class Dispatch:
    """Applies the scheduler's decisions, and tells each job what becomes of its attempts.

    `connected` says whether telemetry could be heard now. `listened_s` is the clock in which silence is counted, and
    that :meth:`look` is told (:class:`giornata.fleet.ListeningClock`).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        placement: Placement,
        line: RowQueue,
        connected: Callable[[], bool] = lambda: True,
        listened_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.placement, self.line = placement, line
        self._scheduler, self._connected, self._listened_s = scheduler, connected, listened_s
        self._pending: dict[Key, PendingRows] = {}
        self._reports: dict[Attempt, asyncio.Future[Outcome]] = {}
        self._claims: dict[Attempt, SchedulingParams] = {}
        """Those of the attempts at workers."""
        self._shares_s = 0.0
        """Time of the next check for rows that have to give way."""
        self._wake: asyncio.TimerHandle | None = None
        placement.listen(listened_s())

    def observe(self, state: ServiceState) -> None:
        """Take in telemetry: a worker may have room again."""
        if self.placement.observe(state, self._listened_s()):
            self._decide()

    def report(self, event: DenoisedEvent) -> None:
        """A worker is done with an attempt; a report of another worker than its present one is void."""
        attempt = event.job_id, event.attempt
        if self.placement.worker(attempt) == event.worker:
            self._resolve(attempt, event)

    def recheck(self) -> None:
        """The connection is back and reports may have been missed: every job reads its record again."""
        self.placement.listen(self._listened_s())
        for attempt in list(self._reports):
            self._resolve(attempt, NoReport.RECHECK)

    def likely(self, demand: JobDemand) -> str | None:
        """See :func:`giornata.scheduling.scheduler.likely_worker`."""
        return likely_worker(self._scheduler, self.placement, demand, time.monotonic())

    def fetching(self, worker: str, demand: JobDemand) -> None:
        """A worker was told to load what `demand` needs."""
        self.placement.fetch(worker, demand, self._listened_s())

    @asynccontextmanager
    async def in_line(
        self,
        job_id: str,
        rows: Sequence[int],
        demand: JobDemand,
        claim: SchedulingParams,
        *,
        numbers: Iterator[int],
        fetching: str | None = None,
    ) -> AsyncIterator[PendingRows]:
        """Wait for workers with room inside; what is placed counts as assigned from that moment.

        `rows` are indices of the job's rows, and `numbers` those of its next attempts; `fetching` is a worker that has
        been told to load what they need.
        """
        claim = replace(claim, takes_s=self.placement.least_ms(demand.piece()) / 1e3)
        key = self.line.join(job_id, demand, claim, time.monotonic(), rows=rows, fetching=fetching).key
        pending = self._pending[key] = PendingRows(rows, numbers, claim)
        self._decide()
        try:
            yield pending
        finally:
            self.line.leave(key)
            del self._pending[key]
            for assignment in pending.placed:
                self.release(job_id, assignment.attempt)

    def adopt(self, job_id: str, assignment: Assignment, demand: JobDemand, claim: SchedulingParams) -> None:
        """Count rows as on the worker that has them already, since another router or an earlier walk gave them."""
        self._claims[job_id, assignment.attempt] = claim
        self.placement.assign(job_id, assignment.attempt, assignment.worker, demand, self._listened_s())

    def release(self, job_id: str, attempt: int) -> None:
        """The rows of an attempt are on no worker any more; rows that wait may have the room."""
        self.placement.release(job_id, attempt)
        self._claims.pop((job_id, attempt), None)
        self._decide()

    @asynccontextmanager
    async def expecting(self, job_id: str, attempt: int) -> AsyncIterator[asyncio.Future[Outcome]]:
        """A future of what becomes of an attempt. Enter before its rows are sent; on leaving it is released."""
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._reports[job_id, attempt] = future
        try:
            yield future
        finally:
            del self._reports[job_id, attempt]
            self.release(job_id, attempt)

    def expect_again(self, attempt: Attempt) -> asyncio.Future[Outcome]:
        """A future of the next outcome of an expected attempt."""
        future = self._reports[attempt] = asyncio.get_running_loop().create_future()
        return future

    def look(self, now: float) -> None:
        """Forget workers that fell silent or whose step does not end, and tell the jobs that wait on them.

        Without a connection every worker is silent, and after a start or a reconnect it takes a while to hear of all.
        """
        if not self._connected():
            self.placement.listen(now)
            return
        given_up = {
            NoReport.LOST: self.placement.expire(now),
            NoReport.UNLISTED: self.placement.unlisted(),
            NoReport.STALLED: self.placement.stalled(),
        }
        for why, bookings in given_up.items():
            for booking in bookings:
                self._resolve(booking.key, why)

    def _resolve(self, attempt: Attempt, outcome: Outcome) -> None:
        future = self._reports.get(attempt)
        if future is not None and not future.done():
            future.set_result(outcome)

    def _decide(self) -> None:
        """Ask the scheduler, apply its decision, and ask again when it wants to be asked."""
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        now = time.monotonic()
        self.placement.heed(self.line.models)
        decision = self._scheduler.decide(self.line, self.placement, now)
        for key, worker, rows, passes in decision.placements:
            pending = self._pending[key]
            given = pending.give(worker, rows)
            self._claims[key[0], given.attempt] = pending.claim
            demand = self.line.serve(key, rows, now, passes)
            self.placement.assign(key[0], given.attempt, worker, demand, self._listened_s())
        for key, worker, demand in decision.loads:
            self._pending[key].load(worker)
            self.line.tell(key, worker)
            self.placement.fetch(worker, demand, self._listened_s())
        wake_at = decision.wake_at
        if len(self.line):
            if now >= self._shares_s:
                self._shares_s = now + SHARES_S
                gives_way = find_yielding_attempt(self.line, self.placement, self._claims, now)
                if gives_way is not None:
                    self._resolve(gives_way, NoReport.PREEMPTED)
            wake_at = min(self._shares_s, wake_at or math.inf)
        if wake_at is not None:
            self._wake = asyncio.get_running_loop().call_later(wake_at - now, self._decide)
