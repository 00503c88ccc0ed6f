"""A denoiser that computes nothing, for tests of what asks it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import nats.errors
from tenacity import AsyncRetrying, retry_if_exception_type, wait_fixed

from giornata import __version__
from giornata.bus.bus import Bus, Endpoint, telemetry
from giornata.records import JobRecordStore
from giornata.wire import subjects
from giornata.wire.errors import ErrorBody
from giornata.wire.jobs import JobRecord, RowState
from giornata.wire.messages import (
    CancelRows,
    DenoisedEvent,
    EventKind,
    PrefetchTemplate,
    RecordRequest,
    RunAnswer,
    RunReply,
    RunRequest,
    StepEvent,
)
from giornata.wire.workers import RowProgress, ServiceName, ServiceState, WorkerCosts, WorkerState
from giornata_lab.bench.systems.networks import plain
from tests.fakes.fleet import CARD, REF
from tests.fakes.news import News


class FakeDenoiser:
    """Takes rows and reports them done after `step_s` a step; `die` makes it fall silent like a killed process."""

    def __init__(
        self,
        bus: Bus,
        records: JobRecordStore,
        instance: str,
        *,
        step_s: float = 0.0,
        capacity: int = 8,
        costs: WorkerCosts | None = None,
    ) -> None:
        self._costs = costs
        self.instance = instance
        self.answer = RunAnswer.ACCEPTED
        self.stepping_ms = 0.0
        """What telemetry tells as the time of the running step."""
        self.going = asyncio.Event()
        """Clear it to hold all steps."""
        self.going.set()
        self.poisoned: set[int] = set()
        self.requests: list[RunRequest] = []
        self.cancelled: list[str] = []
        self.prefetched: list[str] = []
        self.recorded: list[str] = []
        self.news = News()
        self._bus = bus
        self._records = records
        self.step_s = step_s
        self._capacity = capacity
        self.running: dict[tuple[str, int], tuple[RunRequest, int]] = {}
        self._computing: dict[tuple[str, int], asyncio.Task[None]] = {}
        self.silent = asyncio.Event()
        self.gone = asyncio.Event()
        """Set as a silent worker's connection ends; clear until then for one that is frozen."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Serve while inside, or until :meth:`die`."""
        life = asyncio.create_task(self._live(), name="life")
        self._tasks.add(life)
        try:
            await asyncio.sleep(0)
            yield
        finally:
            self.die()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _cancel(self, message: CancelRows) -> None:
        key = message.job_id, message.attempt
        if message.hand_back and key in self.running:
            self._computing[key].cancel()
            self._tasks.add(asyncio.create_task(self._hand_back(*self.running.pop(key)), name="rows"))
        self.cancelled.append(message.job_id)
        self.news.tell()

    def _prefetch(self, message: PrefetchTemplate) -> None:
        self.prefetched.append(message.job.job_id)
        self.news.tell()

    async def _record(self, request: RecordRequest) -> RunReply:
        if self.answer is RunAnswer.ACCEPTED:
            self.recorded.append(request.template.template_id)
        return RunReply(answer=self.answer)

    def die(self) -> None:
        """No more telemetry, answers or reports, and no connection."""
        self.fall_silent()
        self.gone.set()

    def fall_silent(self) -> None:
        """No more telemetry or reports, but a connection that stays, as of a process that is stopped."""
        self.silent.set()
        for task in self._tasks:
            if task.get_name() != "life":
                task.cancel()

    async def drain(self) -> None:
        """Hand back what runs, as a stopping denoiser does."""
        self._draining = True
        for task in self._tasks:
            if task.get_name() == "rows":
                task.cancel()
        for request, step in list(self.running.values()):
            await self._hand_back(request, step)

    async def _hand_back(self, request: RunRequest, step: int) -> None:
        state = RowState(step=step, latents=REF)
        await self._report_rows(request, lambda row: {"resume": state}, handed_back=True)

    async def _live(self) -> None:
        run = Endpoint(subjects.worker(self.instance, "run"), RunRequest, self._take)
        record = Endpoint(subjects.worker(self.instance, "record"), RecordRequest, self._record)
        cancel, prefetch = (subjects.worker(self.instance, verb) for verb in ("cancel", "prefetch"))
        async with (
            self._bus.listen(cancel, CancelRows, self._cancel),
            self._bus.listen(prefetch, PrefetchTemplate, self._prefetch),
            self._bus.answer(run, record),
        ):
            async with telemetry(self._bus, 10, self._state):
                await self.silent.wait()
            await self.gone.wait()

    async def _take(self, request: RunRequest) -> RunReply:
        if self._draining:
            return RunReply(answer=RunAnswer.DRAINING)
        known = {(r.job.job_id, r.attempt) for r in self.requests}
        if self.answer is RunAnswer.ACCEPTED and (request.job.job_id, request.attempt) not in known:
            self.requests.append(request)
            self.news.tell()
            task = asyncio.create_task(self._compute(request), name="rows")
            self._computing[request.job.job_id, request.attempt] = task
            self._tasks.add(task)
        return RunReply(answer=self.answer)

    async def _compute(self, request: RunRequest) -> None:
        steps = request.job.denoising_steps
        first = max((row.resume.step for row in request.rows if row.resume), default=0)
        for step in range(first, steps):
            self.running[request.job.job_id, request.attempt] = (request, step)
            self.news.tell()
            await asyncio.sleep(self.step_s)
            await self.going.wait()
            event = StepEvent(
                job_id=request.job.job_id, attempt=request.attempt, index=0, step=step + 1, steps=steps
            )
            await self._bus.publish(self._subject(request, EventKind.STEP), event)
        self.running.pop((request.job.job_id, request.attempt), None)
        poison = ErrorBody(code="row_poisoned", message="not finite")
        await self._report_rows(
            request,
            lambda row: {"error": poison} if row.index in self.poisoned else {"latents": REF, "resume": None},
        )

    async def _report_rows(
        self, request: RunRequest, outcome: Callable[..., dict[str, object]], *, handed_back: bool = False
    ) -> None:
        def change(record: JobRecord) -> JobRecord | None:
            return record.freed(request.attempt, self.instance, outcome)

        async for attempt in AsyncRetrying(  # as the real one: NATS may be away for a while
            retry=retry_if_exception_type(nats.errors.Error), wait=wait_fixed(0.2)
        ):
            with attempt:
                await self._records.change(request.job.job_id, change)
        event = DenoisedEvent(
            job_id=request.job.job_id,
            attempt=request.attempt,
            worker=self.instance,
            denoise_ms=1,
            wait_ms=0,
            handed_back=handed_back,
        )
        await self._bus.publish(self._subject(request, EventKind.DENOISED), event)

    def _subject(self, request: RunRequest, kind: EventKind) -> str:
        return subjects.event(request.job.gateway, request.job.job_id, kind)

    def _state(self) -> ServiceState:
        rows = tuple(
            RowProgress(job_id=job, attempt=attempt, index=row.index, step=step, steps=4, tokens=16)
            for (job, attempt), (request, step) in self.running.items()
            for row in request.rows
        )
        return ServiceState(
            service=ServiceName.DENOISER,
            instance=self.instance,
            host=socket.gethostname(),
            version=__version__,
            ready=True,
            draining=self._draining,
            models=(CARD,),
            worker=WorkerState(
                capacity_rows=self._capacity,
                capacity_tokens=10_000,
                running=rows,
                stepping_ms=self.stepping_ms,
                blocks=plain(1),
                cost_model=self._costs,
            ),
        )
