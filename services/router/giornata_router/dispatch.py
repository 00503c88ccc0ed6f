"""Handing rows to workers and hearing what became of them: the edge around :mod:`giornata.scheduling`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from enum import Enum
from typing import Final

from giornata.fleet import SILENCE_S
from giornata.scheduling.demand import Demand
from giornata.scheduling.line import Key, Line, Turn
from giornata.scheduling.occupancy import Attempt
from giornata.scheduling.pieces import Pieces
from giornata.scheduling.placement import Placement
from giornata.scheduling.serving import anybody, serve
from giornata.wire.events import DenoisedEvent
from giornata.wire.jobs import Assignment
from giornata.wire.workers import QueueState, ServiceState

TICK_S: Final = 0.25
"""How often silence is looked for; a timer, since silence raises no event."""


class Silence(Enum):
    """Why nothing more will be heard of an attempt."""

    LOST = "the worker fell silent"
    UNLISTED = "the worker does not know the rows"
    STALLED = "the worker's step did not end"
    RECHECK = "reports may have been missed while disconnected"


Outcome = DenoisedEvent | Silence


class Waiting(Pieces):
    """Rows of a job in the line, and who waits for their workers."""

    def __init__(self, rows: Sequence[int], demand: Demand, number: Callable[[], int]) -> None:
        super().__init__(rows, demand, number)
        self._news = asyncio.Event()

    def give(self, worker: str, rows: int) -> tuple[Assignment, Demand]:
        """As :meth:`Pieces.give`; who waits is told."""
        self._news.set()
        return super().give(worker, rows)

    async def assignments(self) -> list[Assignment]:
        """Those made since this was asked last; waits for some."""
        await self._news.wait()
        self._news.clear()
        return self.take()


class Dispatch:
    """Who waits for a worker, and who waits for a worker's report.

    Args:
        placement: of rows on workers.
        line: of those who wait.
        connected: whether one could hear.
    """

    def __init__(
        self, placement: Placement, line: Line | None = None, connected: Callable[[], bool] = lambda: True
    ) -> None:
        self.placement = placement
        self.line = Line() if line is None else line
        self._connected = connected
        self._waiting: dict[Key, Waiting] = {}
        self._refused: set[str] = set()
        self._reports: dict[Attempt, asyncio.Future[Outcome]] = {}
        self._hears_since_s = time.monotonic()

    def queue(self, *, full: bool) -> QueueState:
        """Who waits for a worker, as telemetry tells it; `full` where more may wait to be carried at all."""
        demands = [entry.demand for entry in self.line]
        return QueueState(
            jobs=len(demands),
            rows=sum(demand.rows for demand in demands),
            steps=sum(demand.steps for demand in demands),
            full=full,
            costs=tuple(self.placement.estimates.kinds()),
        )

    def observe(self, state: ServiceState) -> None:
        """Telemetry: a worker may have room again."""
        self.placement.observe(state, time.monotonic())
        self._refused.discard(state.instance)
        self._serve()

    def report(self, event: DenoisedEvent) -> None:
        """A worker is done with an attempt; what another than its present one tells is void."""
        attempt = event.job_id, event.attempt
        if self.placement.worker(attempt) == event.worker:
            self._resolve(attempt, event)

    def recheck(self) -> None:
        """The connection is back and reports may have been missed: who waits for one reads the record again."""
        self._hears_since_s = time.monotonic()
        for attempt in list(self._reports):
            self._resolve(attempt, Silence.RECHECK)

    def likely(self, demand: Demand) -> str | None:
        """The worker that the first piece of `demand` would get now, if nobody came before it."""
        return self.placement.choose(demand.piece(), self._refused)

    @asynccontextmanager
    async def in_line(
        self,
        job_id: str,
        rows: Sequence[int],
        demand: Demand,
        turn: Turn,
        *,
        number: Callable[[], int],
        fetching: str | None = None,
    ) -> AsyncIterator[Waiting]:
        """Wait for workers with room inside; what is placed counts as assigned from that moment.

        Args:
            job_id: whose rows they are.
            rows: their indices.
            demand: of these rows.
            turn: when they come.
            number: numbers the job's attempts.
            fetching: a worker that has been told to read their template from disk.
        """
        waiting = Waiting(rows, demand, number)
        if turn.finish_by_s is not None:
            turn = replace(turn, takes_s=self.placement.least_ms(demand.piece()) / 1e3)
        key = self.line.join(job_id, demand, turn, time.monotonic(), fetching).key
        self._waiting[key] = waiting
        self._serve()
        try:
            yield waiting
        finally:
            self.line.leave(key)
            del self._waiting[key]
            for assignment in waiting.placed:
                self.release(job_id, assignment.attempt)

    def adopt(self, job_id: str, assignment: Assignment, demand: Demand) -> None:
        """Take over an assignment that another router made."""
        self.placement.assign(job_id, assignment.attempt, assignment.worker, demand, time.monotonic())

    def refuse(self, worker: str) -> None:
        """The worker had no room: do not ask it again before its next telemetry."""
        self._refused.add(worker)

    def release(self, job_id: str, attempt: int) -> None:
        """The rows of an attempt are on no worker any more; somebody who waits may have the room."""
        self.placement.release(job_id, attempt)
        self._serve()

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

    async def watch_for_silence(self) -> None:
        """Look for silence; runs for ever, in a standby too, so that it takes over with none but live workers."""
        while True:
            await asyncio.sleep(TICK_S)
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Forget workers that fell silent or whose step does not end, and tell those who wait on them.

        Without a connection everybody is silent, and after a start or a reconnect it takes a while to hear of all.
        """
        if not self._connected():
            self._hears_since_s = now
        if now - self._hears_since_s < SILENCE_S:
            return
        for assignment in self.placement.expire(now):
            self._resolve((assignment.job_id, assignment.attempt), Silence.LOST)
        for assignment in self.placement.doubtful(now):
            self._resolve((assignment.job_id, assignment.attempt), Silence.UNLISTED)
        for assignment in self.placement.stalled():
            self._resolve((assignment.job_id, assignment.attempt), Silence.STALLED)
        self._refused = {worker for worker in self._refused if self.placement.fleet.get(worker)}

    def _resolve(self, attempt: Attempt, outcome: Outcome) -> None:
        future = self._reports.get(attempt)
        if future is not None and not future.done():
            future.set_result(outcome)

    def _serve(self) -> None:
        """Give workers to those who wait."""
        if not anybody(self.line, self.placement, self._refused):
            return
        now = time.monotonic()
        for entry, worker in serve(self.line, self.placement, now, self._refused):
            given, demand = self._waiting[entry.key].give(worker, entry.demand.rows)
            self.placement.assign(entry.job_id, given.attempt, worker, demand, now)
