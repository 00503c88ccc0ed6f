"""Handing rows to workers and hearing what became of them: the edge around :mod:`giornata_router.placement`."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum

from giornata.events import DenoisedEvent
from giornata.fleet import SILENCE_S
from giornata.jobs import Priority
from giornata.workers import QueueState, ServiceState
from giornata_router.placement import Placement
from giornata_router.policy import Demand

TICK_S = 0.25
"""How often silence is looked for; a timer, since silence raises no event."""
MAX_PASSED = 32
"""Jobs served before an older one that needs more room than they; after these a worker is kept free for it."""


class Silence(Enum):
    """Why nothing more will be heard of an attempt."""

    LOST = "the worker fell silent"
    UNLISTED = "the worker does not know the rows"
    RECHECK = "reports may have been missed while disconnected"


Outcome = DenoisedEvent | Silence

_ORDER = {Priority.INTERACTIVE: 0, Priority.BATCH: 1}


@dataclass(order=True)
class _Waiting:
    order: tuple[int, int]
    job_id: str = field(compare=False)
    attempt: int = field(compare=False)
    demand: Demand = field(compare=False)
    worker: asyncio.Future[str] = field(compare=False)
    preferred: str | None = field(default=None, compare=False)
    passed: int = field(default=0, compare=False)
    """Later jobs of the same model that were served first, since they needed less room."""


class Dispatch:
    """Who waits for a worker, and who waits for a worker's report."""

    def __init__(self, placement: Placement, connected: Callable[[], bool] = lambda: True) -> None:
        self.placement = placement
        self._connected = connected
        self._waiting: list[_Waiting] = []
        self._tickets = itertools.count()
        self._refused: set[str] = set()
        self._reports: dict[str, asyncio.Future[Outcome]] = {}
        self._hears_since_s = time.monotonic()

    @property
    def waiting(self) -> int:
        """Jobs that wait for a worker."""
        return len(self._waiting)

    def queue(self, *, full: bool) -> QueueState:
        """Who waits for a worker, as telemetry tells it; `full` where more may wait to be carried at all."""
        demands = [waiting.demand for waiting in self._waiting]
        return QueueState(
            jobs=len(demands),
            rows=sum(demand.rows for demand in demands),
            steps=sum(demand.steps for demand in demands),
            full=full,
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
        self,
        job_id: str,
        attempt: int,
        demand: Demand,
        priority: Priority,
        *,
        preferred: str | None = None,
    ) -> str:
        """Wait for a worker with room; the demand counts as assigned to it from this moment.

        Where `preferred` has room, it is the one.
        """
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        order = (_ORDER[priority], next(self._tickets))
        waiting = _Waiting(order, job_id, attempt, demand, future, preferred)
        self._waiting.append(waiting)
        self._waiting.sort()
        self._serve()
        try:
            return await future
        except asyncio.CancelledError:
            self.release(job_id)
            raise
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)

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
        """Forget workers that fell silent, and tell those who wait on them.

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
        self._refused = {worker for worker in self._refused if self.placement.fleet.get(worker)}

    def _resolve(self, job_id: str, outcome: Outcome) -> None:
        future = self._reports.get(job_id)
        if future is not None and not future.done():
            future.set_result(outcome)

    def _serve(self) -> None:
        """Give workers to those who wait, in order.

        A job that no worker has room for lets later, smaller ones pass, but only :data:`MAX_PASSED` of them: then the
        worker that is empty first is kept for it. Interactive jobs come before batch jobs and never wait for them.
        """
        excluded = set(self._refused)
        left: dict[str, _Waiting] = {}  # by model, the first job that there is no room for
        # by model, rows that there is no room for: less cannot help those that follow
        too_many: dict[str, int] = {}
        for waiting in list(self._waiting):
            demand, model = waiting.demand, waiting.demand.model_digest
            if waiting.worker.done() or demand.rows >= too_many.get(model, demand.rows + 1):
                continue
            worker = self.placement.choose(demand, excluded, waiting.preferred)
            if worker is None:
                too_many[model] = demand.rows
                first = left.setdefault(model, waiting)
                if first is waiting and waiting.passed >= MAX_PASSED:
                    excluded |= self.placement.soonest(demand, excluded)
                continue
            self._give(waiting, worker)
            if model in left:
                left[model].passed += 1

    def _give(self, waiting: _Waiting, worker: str) -> None:
        self.placement.assign(waiting.job_id, waiting.attempt, worker, waiting.demand, time.monotonic())
        self._waiting.remove(waiting)
        waiting.worker.set_result(worker)
