"""Carrying assignments: one task each, from acceptance to report.

Fetch the inputs, submit the rows, wait until the engine has released them, write the outcome, tell it. A task is
cancelled when its attempt is void: then nobody waits for a report.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import structlog
from pydantic import BaseModel

from giornata.wire.errors import GiornataError, InternalError, JobNotFound, Overloaded
from giornata.wire.events import DenoisedEvent, EventKind, StepEvent
from giornata.wire.jobs import Job, JobRecord
from giornata.wire.messages import RunAnswer, RunRequest
from giornata_denoiser.attempts.assignments import Assignment, AssignmentKey, Assignments
from giornata_denoiser.attempts.outcomes import Outcomes
from giornata_denoiser.engine.engine import StepReport
from giornata_denoiser.engine.loop import EngineLoop
from giornata_denoiser.rows.row import Row

Fetch = Callable[[RunRequest], AbstractAsyncContextManager[tuple[Row, ...]]]
"""Makes a request's rows, as `inputs.rows_of`, and keeps what they take from in memory."""
Publish = Callable[[Job, EventKind, BaseModel], Awaitable[None]]
"""Publishes an event of a job."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _Carried:
    assignment: Assignment
    task: asyncio.Task[None]
    released: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the engine is done with the rows, or will do no more for them."""


class Carrier:
    """The assignments of one worker, and the tasks that carry them.

    Args:
        worker: instance that reports.
        capacity_rows: rows that may be unfinished at a time.
        engine: runs already.
        fetch: where rows come from; entered while they are computed.
        outcomes: where they go.
        publish: where events go.
        tasks: owner of the tasks.
    """

    def __init__(
        self,
        worker: str,
        *,
        capacity_rows: int,
        engine: EngineLoop,
        fetch: Fetch,
        outcomes: Outcomes,
        publish: Publish,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.assignments = Assignments(capacity_rows)
        self._worker = worker
        self._engine = engine
        self._fetch = fetch
        self._outcomes = outcomes
        self._publish = publish
        self._tasks = tasks
        self._carried: dict[AssignmentKey, _Carried] = {}
        self._draining = False

    def take(self, request: RunRequest) -> RunAnswer:
        """Whether the rows can come; asked again, the answer is the same. What is taken starts at once."""
        assignment = Assignment(request, time.perf_counter())
        if assignment.key in self.assignments:
            return RunAnswer.ACCEPTED
        if self._draining:
            return RunAnswer.DRAINING
        again = {row.index for row in request.rows}
        for other in self.assignments.of_job(request.job.job_id):
            if other.request.attempt < request.attempt and not again.isdisjoint(other.indices):
                self.drop(other.key)
        if not self.assignments.has_room(len(request.rows)):
            return RunAnswer.FULL
        self.assignments.add(assignment)
        task = self._tasks.create_task(self._carry(assignment), name="assignment")
        task.add_done_callback(lambda _: self._forget(assignment))
        self._carried[assignment.key] = _Carried(assignment, task)
        return RunAnswer.ACCEPTED

    def drop(self, key: AssignmentKey) -> None:
        """Forget an attempt that has been given to another, or whose job has ended."""
        carried = self._carried.get(key)
        if carried is not None:
            log.info("assignment_dropped", job=key[0], attempt=key[1])
            carried.task.cancel()
            self._forget(carried.assignment)

    def drop_job(self, job_id: str) -> None:
        """Forget every attempt at a job that is cancelled."""
        for assignment in self.assignments.of_job(job_id):
            self.drop(assignment.key)

    async def advance(self, report: StepReport) -> None:
        """Tell what a step did, and release the assignments that it has finished."""
        for failure in report.failed:
            log.warning(
                "row_failed", key=failure.row.key, error=str(failure.error), exc_info=failure.error.__cause__
            )
        for assignment in self.assignments:
            for row in assignment.advance(report):
                await self._publish(assignment.request.job, EventKind.STEP, _step_event(row))
            carried = self._carried.get(assignment.key)
            if carried is not None and assignment.rows and not assignment.unfinished:
                carried.released.set()

    async def drain(self, limit_s: float, hand_back_s: float) -> None:
        """Take nothing more; finish within `limit_s`; hand back within `hand_back_s` what is not done by then."""
        self._draining = True
        await self._wait(limit_s)
        for row in self._engine.take_all():
            assignment = self.assignments.get(row.key)
            if assignment is not None:
                assignment.rows[row.key.index] = row
        for carried in self._carried.values():
            carried.released.set()
        await self._wait(hand_back_s)
        for carried in self._carried.values():
            carried.task.cancel()

    async def _wait(self, limit_s: float) -> None:
        tasks = [carried.task for carried in self._carried.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=limit_s)

    async def _carry(self, assignment: Assignment) -> None:
        request = assignment.request
        try:
            async with asyncio.timeout(request.remaining_ms / 1000):
                await self._compute(assignment)
                handed_back = bool(assignment.unfinished)
                record = await self._outcomes.write(assignment)
            await self._tell(assignment, record, handed_back=handed_back)
        except TimeoutError:
            log.warning("assignment_out_of_time", job=request.job.job_id, attempt=request.attempt)
        except JobNotFound:
            log.warning("assignment_without_record", job=request.job.job_id, attempt=request.attempt)
        except Exception:  # the task's edge: logged; the router asks elsewhere for what nobody lists any more
            log.exception("assignment_failed", job=request.job.job_id, attempt=request.attempt)

    def _forget(self, assignment: Assignment) -> None:
        """Its rows take no room any more. Called when it is dropped, and when its task has ended, begun or not."""
        if self.assignments.remove(assignment):
            self._engine.cancel(*assignment.key)
            del self._carried[assignment.key]

    async def _compute(self, assignment: Assignment) -> None:
        """Until every row has a latent or an error; rows that have neither are handed back."""
        job_id = assignment.request.job.job_id
        try:
            async with self._fetch(assignment.request) as rows:
                assignment.start(rows)
                if self._engine.submit(rows):
                    await self._carried[assignment.key].released.wait()
        except Overloaded as error:
            log.warning("inputs_unreachable", job=job_id, error=str(error))
        except GiornataError as error:
            assignment.fail(error)
        except Exception:  # the assignment's edge: logged and answered
            log.exception("inputs_failed", job=job_id)
            assignment.fail(InternalError())

    async def _tell(self, assignment: Assignment, record: JobRecord, *, handed_back: bool) -> None:
        """The event that follows the record, unless the attempt is void."""
        job, attempt = assignment.request.job, assignment.request.attempt
        reported = any(row.attempt == attempt and row.index in assignment.indices for row in record.rows)
        if not reported or record.state.terminal:
            log.info("attempt_void", job=job.job_id, attempt=attempt)
            return
        event = DenoisedEvent(
            job_id=job.job_id,
            attempt=attempt,
            worker=self._worker,
            denoise_ms=assignment.denoise_ms,
            wait_ms=assignment.wait_ms,
            compute_ms=assignment.compute_ms,
            handed_back=handed_back,
        )
        await self._publish(job, EventKind.DENOISED, event)


def _step_event(row: Row) -> StepEvent:
    key = row.key
    return StepEvent(job_id=key.job_id, attempt=key.attempt, index=key.index, step=row.step, steps=row.steps)
