"""Attempts are run: one task each, from acceptance to report, for the router of the latest epoch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import asdict
from typing import Any, NamedTuple

import structlog
from pydantic import BaseModel

from giornata.scheduling.batch import RowKey
from giornata.tracing import NO_STEPS, span
from giornata.wire.errors import GiornataError, InternalError, JobNotFound, Overloaded
from giornata.wire.jobs import Job, JobRecord
from giornata.wire.messages import DenoisedEvent, Epoch, EventKind, RunAnswer, RunRequest, StepEvent
from giornata_denoiser.attempts.attempt import (
    Attempt,
    AttemptKey,
    AttemptResultWriter,
    denoise_span,
    has_room,
    key_of,
    tell_step,
)
from giornata_denoiser.engine.engine import RowEngine
from giornata_denoiser.engine.model_runner import StepReport
from giornata_denoiser.rows.row import Row


class EpochFence:
    """The highest epoch that this worker has heard of; a router of a lower one was superseded."""

    def __init__(self) -> None:
        self._highest: Epoch | None = None

    def admits(self, epoch: Epoch | None) -> bool:
        """Return whether a router of `epoch` is obeyed. None is one whose version sends no epoch: it always is."""
        if epoch is None:
            return True
        if self._highest is not None and epoch < self._highest:
            return False
        self._highest = epoch
        return True


class AttemptInputs(NamedTuple):
    """The inputs from which an attempt's rows are made."""

    rows: tuple[Row, ...]
    arriving: Awaitable[object]
    """Ends when all LoRAs of the rows have been loaded, or with the error of one that cannot be."""
    failed: asyncio.Future[None]
    """Has the error of a ControlNet that cannot be had, and never ends else."""


Fetch = Callable[[RunRequest], AbstractAsyncContextManager[AttemptInputs]]
"""Makes a request's rows, as `inputs.rows_of`, and keeps what they take from in memory."""
Publish = Callable[[Job, EventKind, BaseModel], Awaitable[None]]
"""Publishes an event of a job."""

log = structlog.get_logger(__name__)


class AttemptRunner:
    """The attempts that a worker has accepted, and the tasks that carry them.

    Only an idle worker takes more rows than `capacity_rows`. The engine runs already; `fetch` is entered while rows are
    computed.
    """

    def __init__(
        self,
        worker: str,
        *,
        capacity_rows: int,
        engine: RowEngine,
        fetch: Fetch,
        outcomes: AttemptResultWriter,
        publish: Publish,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._worker, self._capacity_rows, self._engine = worker, capacity_rows, engine
        self._fetch, self._outcomes, self._publish, self._tasks = fetch, outcomes, publish, tasks
        self._carried: dict[AttemptKey, Attempt] = {}
        self._draining = False

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """Every attempt that is accepted and not yet reported."""
        return tuple(self._carried.values())

    def attempt_of(self, key: RowKey) -> Attempt | None:
        """The attempt that a row belongs to, if it is here."""
        return self._carried.get(key_of(key))

    def take(self, request: RunRequest) -> RunAnswer:
        """Return whether the rows can come; asked again, the answer is the same. What is taken starts at once."""
        attempt = Attempt(request, time.perf_counter())
        if attempt.key in self._carried:
            return RunAnswer.ACCEPTED
        if self._draining:
            return RunAnswer.DRAINING
        for other in self._of_job(request.job.job_id):
            if other.request.attempt < request.attempt and not attempt.indices.isdisjoint(other.indices):
                self.drop(other.key)
        if not has_room(self.attempts, len(request.rows), self._capacity_rows):
            return RunAnswer.FULL
        attempt.task = self._tasks.create_task(self._carry(attempt), name="attempt")
        attempt.task.add_done_callback(lambda _: self._forget(attempt))
        self._carried[attempt.key] = attempt
        return RunAnswer.ACCEPTED

    def drop(self, key: AttemptKey) -> None:
        """Forget an attempt that has been given to another worker, or whose job has ended."""
        attempt = self._carried.get(key)
        if attempt is not None:
            log.info("attempt_dropped", job=key[0], attempt=key[1])
            attempt.cancel()
            self._forget(attempt)

    def hand_back(self, key: AttemptKey) -> None:
        """Report the rows of an attempt as of their last step; those that are not in the engine yet go on."""
        attempt, rows = self._carried.get(key), self._engine.cancel(*key)
        if attempt is not None and rows:
            attempt.rows |= {row.key.index: row for row in rows}
            attempt.released.set()

    def drop_job(self, job_id: str) -> None:
        """Forget every attempt at a job that is cancelled."""
        for attempt in self._of_job(job_id):
            self.drop(attempt.key)

    async def advance(self, report: StepReport) -> None:
        """Tell what a step did, and release the attempts that it has finished."""
        for failure in report.failed:
            log.warning(
                "row_failed", key=failure.row.key, error=str(failure.error), exc_info=failure.error.__cause__
            )
        for attempt in self.attempts:
            advanced = attempt.advance(report)
            if attempt.traced is not NO_STEPS and advanced:
                tell_step(attempt.traced, report)
            for row in advanced:
                event = StepEvent(**asdict(row.key), step=row.step, steps=row.steps)
                await self._publish(attempt.request.job, EventKind.STEP, event)
            if attempt.rows and not attempt.unfinished:
                attempt.released.set()

    async def drain(self, limit_s: float, hand_back_s: float) -> None:
        """Take nothing more; finish within `limit_s`; hand back within `hand_back_s` what is not done by then."""
        self._draining = True
        await self._wait(limit_s)
        for row in self._engine.take_all():
            if (carried := self.attempt_of(row.key)) is not None:
                carried.rows[row.key.index] = row
        for attempt in self.attempts:
            attempt.released.set()
        await self._wait(hand_back_s)
        for attempt in self.attempts:
            attempt.cancel()

    def _of_job(self, job_id: str) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.request.job.job_id == job_id]

    async def _wait(self, limit_s: float) -> None:
        tasks = [attempt.task for attempt in self.attempts if attempt.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=limit_s)

    async def _carry(self, attempt: Attempt) -> None:
        request = attempt.request
        try:
            with denoise_span(attempt):
                async with asyncio.timeout(request.remaining_ms / 1000):
                    await self._compute(attempt)
                    handed_back = bool(attempt.unfinished)
                    with span("write outcome"):
                        record, superseded = await self._outcomes.write(attempt)
                await self._tell(attempt, record, handed_back=handed_back)
            await self._outcomes.forget(superseded)
        except TimeoutError:
            log.warning("attempt_out_of_time", job=request.job.job_id, attempt=request.attempt)
        except JobNotFound:
            log.warning("attempt_without_record", job=request.job.job_id, attempt=request.attempt)
        except Exception:  # the task's edge: logged; the router asks elsewhere for rows that no worker lists
            log.exception("attempt_failed", job=request.job.job_id, attempt=request.attempt)

    def _forget(self, attempt: Attempt) -> None:
        """Free the room of its rows. Called when it is dropped, and when its task has ended, begun or not."""
        if self.attempt_of(RowKey(*attempt.key, 0)) is attempt:
            self._engine.cancel(*attempt.key)
            del self._carried[attempt.key]

    async def _compute(self, attempt: Attempt) -> None:
        """Until every row has a latent or an error; rows that have neither are handed back."""
        job_id = attempt.request.job.job_id
        try:
            async with AsyncExitStack() as stack:
                with span("inputs"):
                    fetched = await stack.enter_async_context(self._fetch(attempt.request))
                rows = tuple(map(attempt.promised, fetched.rows))
                attempt.rows = {row.key.index: row for row in rows}
                if self._engine.submit(rows):
                    await self._released(attempt, fetched)
        except Overloaded as error:
            log.warning("inputs_unreachable", job=job_id, error=str(error))
        except GiornataError as error:
            attempt.fail(error)
        except Exception:  # the attempt's edge: logged and answered
            log.exception("inputs_failed", job=job_id)
            attempt.fail(InternalError())

    async def _released(self, attempt: Attempt, fetched: AttemptInputs) -> None:
        """Until the engine is done with its rows; those that wait for LoRAs go on once these have arrived.

        Raises:
            GiornataError: LoRAs cannot be loaded, or ControlNets are not to be had.
        """
        released = asyncio.create_task(attempt.released.wait(), name="released")
        loading = asyncio.ensure_future(fetched.arriving)
        waiting: set[asyncio.Future[Any]] = {released, loading, fetched.failed}
        try:
            while not released.done():
                ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if released in ended:
                    return
                for one in ended:
                    one.result()
                self._engine.resume(*attempt.key)
        finally:
            released.cancel()
            await asyncio.wait([released])

    async def _tell(self, attempt: Attempt, record: JobRecord, *, handed_back: bool) -> None:
        """The event that follows the record, unless the attempt is void."""
        job, number = attempt.request.job, attempt.request.attempt
        reported = any(row.attempt == number and row.index in attempt.indices for row in record.rows)
        if not reported or record.state.terminal:
            log.info("attempt_void", job=job.job_id, attempt=number)
            return
        event = DenoisedEvent(
            job_id=job.job_id,
            attempt=number,
            worker=self._worker,
            denoise_ms=attempt.denoise_ms,
            wait_ms=attempt.wait_ms,
            compute_ms=attempt.compute_ms,
            handed_back=handed_back,
        )
        await self._publish(job, EventKind.DENOISED, event)
