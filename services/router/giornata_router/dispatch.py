"""Handing rows to workers and hearing what became of them: the edge around :mod:`giornata.scheduling`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from giornata.events import DenoisedEvent
from giornata.fleet import SILENCE_S
from giornata.scheduling.demand import Demand
from giornata.scheduling.line import Line, Turn
from giornata.scheduling.placement import Placement
from giornata.scheduling.serving import anybody, serve
from giornata.workers import QueueState, ServiceState

TICK_S: Final = 0.25
"""How often silence is looked for; a timer, since silence raises no event."""


class Silence(Enum):
    """Why nothing more will be heard of an attempt."""

    LOST = "the worker fell silent"
    UNLISTED = "the worker does not know the rows"
    STALLED = "the worker's step did not end"
    RECHECK = "reports may have been missed while disconnected"


Outcome = DenoisedEvent | Silence


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A job in the line."""

    attempt: int
    """That it wants a worker for."""
    worker: asyncio.Future[str]
    """Who gets it."""


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
        self._waiting: dict[str, _Waiting] = {}
        """By job."""
        self._refused: set[str] = set()
        self._reports: dict[str, asyncio.Future[Outcome]] = {}
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
        """A worker is done with an attempt; what is told of an older attempt than the present one is void."""
        if self.placement.attempt(event.job_id) == event.attempt:
            self._resolve(event.job_id, event)

    def recheck(self) -> None:
        """The connection is back and reports may have been missed: who waits for one reads the record again."""
        self._hears_since_s = time.monotonic()
        for job_id in list(self._reports):
            self._resolve(job_id, Silence.RECHECK)

    def likely(self, demand: Demand) -> str | None:
        """The worker that `demand` would get now, if nobody came before it."""
        return self.placement.choose(demand, self._refused)

    async def acquire(
        self, job_id: str, attempt: int, demand: Demand, turn: Turn, *, fetching: str | None = None
    ) -> str:
        """Wait for a worker with room; the demand counts as assigned to it from this moment.

        `fetching` has been told to read its template from disk.
        """
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        if turn.finish_by_s is not None:
            turn = replace(turn, takes_s=self.placement.least_ms(demand) / 1e3)
        self.line.join(job_id, demand, turn, time.monotonic(), fetching)
        self._waiting[job_id] = _Waiting(attempt, future)
        self._serve()
        try:
            return await future
        except asyncio.CancelledError:
            self.release(job_id)
            raise
        finally:
            self.line.leave(job_id, served=False)
            del self._waiting[job_id]

    def adopt(self, job_id: str, attempt: int, worker: str, demand: Demand) -> None:
        """Take over an assignment that another router made."""
        self.placement.assign(job_id, attempt, worker, demand, time.monotonic())

    def refuse(self, worker: str) -> None:
        """The worker had no room: do not ask it again before its next telemetry."""
        self._refused.add(worker)

    def release(self, job_id: str) -> None:
        """The job's rows are on no worker any more; somebody who waits may have the room."""
        self.placement.release(job_id)
        self._serve()

    @asynccontextmanager
    async def expecting(self, job_id: str) -> AsyncIterator[asyncio.Future[Outcome]]:
        """A future of what becomes of the job's present attempt. Enter before the rows are sent."""
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._reports[job_id] = future
        try:
            yield future
        finally:
            self._reports.pop(job_id, None)

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
            self._resolve(assignment.job_id, Silence.LOST)
        for assignment in self.placement.doubtful(now):
            self._resolve(assignment.job_id, Silence.UNLISTED)
        for assignment in self.placement.stalled():
            self._resolve(assignment.job_id, Silence.STALLED)
        self._refused = {worker for worker in self._refused if self.placement.fleet.get(worker)}

    def _resolve(self, job_id: str, outcome: Outcome) -> None:
        future = self._reports.get(job_id)
        if future is not None and not future.done():
            future.set_result(outcome)

    def _serve(self) -> None:
        """Give workers to those who wait; who is being cancelled waits no more."""
        for job_id in [job_id for job_id, waiting in self._waiting.items() if waiting.worker.done()]:
            self.line.leave(job_id, served=False)
        if not anybody(self.line, self.placement, self._refused):
            return
        now = time.monotonic()
        for entry, worker in serve(self.line, self.placement, now, self._refused):
            waiting = self._waiting[entry.job_id]
            self.placement.assign(entry.job_id, waiting.attempt, worker, entry.demand, now)
            waiting.worker.set_result(worker)
