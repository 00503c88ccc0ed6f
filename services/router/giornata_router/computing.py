"""A job's rows at the workers: placed, sent, waited for, and placed again where they came back.

Rows that one worker gets together are an attempt. Those of one job are independent: some may be computed while others
wait, and what is lost with its worker is placed anew while the others go on.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable, Sequence

import nats.errors
import structlog

from giornata.deadlines import Deadline
from giornata.scheduling.demand import Demand
from giornata.scheduling.line import Claim
from giornata.wire import subjects
from giornata.wire.errors import DeadlineExceeded, GiornataError, InternalError, JobCancelled, Overloaded
from giornata.wire.events import DenoisedEvent
from giornata.wire.jobs import Assignment, Encoding, Inspection, JobRecord, JobState, Row, assignments
from giornata.wire.messages import CancelRows, RunAnswer, RunReply, RunRequest
from giornata_router import transitions
from giornata_router.dispatch import NoReport, Outcome
from giornata_router.ledger import Ledger
from giornata_router.progress import EndedError, Progress, heed_cancel
from giornata_router.tools import RUN_REPLY_S, Tools

log = structlog.get_logger(__name__)


class Computing:
    """Make it once the job is encoded, then await :meth:`run` once.

    Args:
        tools: of the router.
        progress: of the job.
        ledger: told how long it waited and was denoised.
        deadline: of the job.
        inspection: of its pictures.
        encoding: of its rows.
        fetching: the worker that was told to read their template from disk.
    """

    def __init__(
        self,
        tools: Tools,
        progress: Progress,
        ledger: Ledger,
        deadline: Deadline,
        *,
        inspection: Inspection,
        encoding: Encoding,
        fetching: str | None = None,
    ) -> None:
        self._tools, self._dispatch = tools, tools.dispatch
        self._progress, self._ledger, self._deadline = progress, ledger, deadline
        self._inspection, self._encoding, self._fetching = inspection, encoding, fetching
        self._job = progress.job
        self._numbers = itertools.count(progress.record.attempt + 1)
        self._tasks = asyncio.TaskGroup()

    async def run(self) -> None:
        """Until every row has its latents or an error.

        Raises:
            AttemptsExhausted: too many workers were lost with one of them.
        """
        with self._ledger.denoising():
            try:
                async with self._tasks:
                    self._go_on(self._progress.record.pending_rows)
            except ExceptionGroup as group:
                raise _foremost(group) from None
        await self._progress.reread()

    def _go_on(self, rows: Iterable[Row]) -> None:
        """With rows that are to be computed: who has them is asked, the others are placed."""
        by_index = {row.index: row for row in rows}
        for assignment in assignments(by_index.values()):
            # they may not have been sent yet, or be done: who assigned them may have died at any moment
            held = [by_index[index] for index in assignment.rows]
            self._tasks.create_task(self._attempt(assignment, held, adopted=True), name="attempt")
        free = [row for row in by_index.values() if row.worker is None]
        if free:
            self._tasks.create_task(self._place(free), name="place")

    async def _place(self, rows: Sequence[Row]) -> None:
        """Find workers for `rows`, and write down who has them before they are sent."""
        error = transitions.exhausted(rows, self._progress.record.causes, self._tools.config.max_failures)
        if error is not None:
            raise error
        job, demand = self._job, self._demand(rows)
        claim = Claim(job.priority, job.tenant, job.weight, self._denoised_by_s(demand))
        indices = [row.index for row in rows]
        self._progress.doing = "waiting for a worker with room"
        async with self._dispatch.in_line(
            job.job_id, indices, demand, claim, number=lambda: next(self._numbers), fetching=self._fetching
        ) as pending:
            while pending.left or pending.placed:
                await self._assign(await pending.assignments())

    async def _assign(self, given: Sequence[Assignment]) -> None:
        begun: list[Assignment] = []
        try:
            record = await self._progress.change(
                lambda r: transitions.assigned(
                    r, given, self._inspection, self._encoding, self._ledger.times()
                )
            )
            for assignment in given:
                if assignment in record.assignments:
                    begun.append(assignment)
                    self._begin(assignment, _pending(record, assignment.rows))
                else:  # another router was faster with some of them
                    self._go_on(_pending(record, assignment.rows))
        finally:
            for assignment in given:
                if assignment not in begun:
                    self._dispatch.release(self._job.job_id, assignment.attempt)

    def _begin(self, assignment: Assignment, rows: Sequence[Row]) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            if task.cancelled():  # maybe before it ran, so that it has released nothing
                self._dispatch.release(self._job.job_id, assignment.attempt)

        task = self._tasks.create_task(self._attempt(assignment, rows, adopted=False), name="attempt")
        task.add_done_callback(ended)

    async def _attempt(self, assignment: Assignment, rows: Sequence[Row], *, adopted: bool) -> None:
        """Send `rows` to who has them, or ask whether it has, and wait for what becomes of them."""
        job_id = self._job.job_id
        async with self._dispatch.expecting(job_id, assignment.attempt) as report:
            if adopted:
                self._dispatch.adopt(job_id, assignment, self._demand(rows))
            record = await self._offered(assignment, rows, adopted=adopted)
            if record is None:
                record = await self._settled(assignment, await report)
        self._go_on(_pending(record, assignment.rows))

    async def _offered(
        self, assignment: Assignment, rows: Sequence[Row], *, adopted: bool
    ) -> JobRecord | None:
        """Send the rows to their worker, which ignores what it has already; the record if it did not take them.

        An attempt that nobody answers for is lost if the worker may have begun it; else no harm was done.
        """
        job, worker = self._job, assignment.worker
        request = RunRequest(
            job=job,
            attempt=assignment.attempt,
            inspection=self._inspection,
            encoding=self._encoding,
            rows=tuple(rows),
            remaining_ms=self._deadline.remaining_ms(),
        )
        limit = self._deadline.at_most(RUN_REPLY_S)
        try:
            reply = await self._tools.bus.call(subjects.worker_run(worker), request, RunReply, limit)
        except (Overloaded, DeadlineExceeded, InternalError) as error:
            log.warning("worker_unreachable", job=job.job_id, worker=worker, error=str(error))
            self._dispatch.placement.refuse(worker)
            if isinstance(error, Overloaded) and not adopted:
                return await self._progress.change(lambda r: transitions.taken_back(r, assignment))
            return await self._lost(assignment, str(error))
        heed_cancel()
        if reply.answer is not RunAnswer.ACCEPTED:
            self._dispatch.placement.refuse(worker)
            return await self._progress.change(lambda r: transitions.taken_back(r, assignment))
        self._progress.doing = "denoising"
        await self._progress.tell(JobState.RUNNING, assignment.attempt)
        return None

    async def _settled(self, assignment: Assignment, outcome: Outcome) -> JobRecord:
        """The record is the truth; the outcome only says that it is worth reading."""
        if isinstance(outcome, DenoisedEvent):
            self._ledger.denoised(outcome.denoise_ms)
            self._ledger.compute("denoise", outcome.compute_ms)
        record = await self._progress.reread()
        if outcome is NoReport.RECHECK or assignment not in record.assignments:
            return record
        if outcome is NoReport.PREEMPTED:
            await drop(self._tools, self._job.job_id, assignment)
            return await self._progress.change(lambda record: transitions.taken_back(record, assignment))
        why = str(outcome.value if isinstance(outcome, NoReport) else outcome)
        log.warning("attempt_lost", job=self._job.job_id, **assignment._asdict(), why=why)
        return await self._lost(assignment, why)

    async def _lost(self, assignment: Assignment, why: str) -> JobRecord:
        """Give an attempt up; should its worker have it after all, it is to drop it."""
        await drop(self._tools, self._job.job_id, assignment)
        return await self._progress.change(lambda record: transitions.lost(record, assignment, why))

    def _demand(self, rows: Sequence[Row]) -> Demand:
        record, limit = self._progress.record, self._tools.config.max_failures
        return transitions.demand(record, self._inspection, rows, self._encoding, max_failures=limit)

    def _denoised_by_s(self, demand: Demand) -> float | None:
        """When the rows have to be computed, by the monotonic clock, for the job to end when its client wants it to."""
        slo_ms = self._job.parameters.slo_ms
        if slo_ms is None:
            return None
        left_ms = slo_ms - self._ledger.times().spent_ms - self._tools.forecasting.finish_ms(demand)
        return time.monotonic() + left_ms / 1e3


async def drop(tools: Tools, job_id: str, assignment: Assignment) -> None:
    """Tell the worker of an attempt that nobody wants its rows any more."""
    message = CancelRows(job_id=job_id, attempt=assignment.attempt)
    await tools.bus.publish(subjects.worker_cancel(assignment.worker), message)


def _pending(record: JobRecord, rows: Sequence[int]) -> tuple[Row, ...]:
    """Of `rows`, those that are still to be computed."""
    return tuple(row for row in record.pending_rows if row.index in rows)


def _foremost(group: ExceptionGroup) -> Exception:
    """The one that says what becomes of the job, where several attempts failed at once."""
    kinds = (EndedError, JobCancelled, GiornataError, nats.errors.Error, Exception)
    found = []
    for error in group.exceptions:
        single = _foremost(error) if isinstance(error, ExceptionGroup) else error
        found.append((next(i for i, kind in enumerate(kinds) if isinstance(single, kind)), single))
    return min(found, key=lambda pair: pair[0])[1]
