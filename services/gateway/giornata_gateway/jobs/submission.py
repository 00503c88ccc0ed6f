"""From a prepared job to an accepted one, and back out when its requester leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import structlog
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_exponential_jitter

from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.wire import subjects
from giornata.wire.errors import (
    DeadlineExceeded,
    GiornataError,
    InternalError,
    JobNotFound,
    ServiceUnavailable,
)
from giornata.wire.jobs import Job, JobRecord
from giornata.wire.messages import Accepted, SubmitRequest
from giornata_gateway.jobs.ends import JobEnds
from giornata_gateway.jobs.ledger import Ledger
from giornata_gateway.jobs.preparation import Preparation, Prepared

log = structlog.get_logger(__name__)

TRY_S = 2.0
"""How long one try of a submission waits for the router."""

T = TypeVar("T")


async def answered(ask: Callable[[], Awaitable[T]], window_s: float, *again: type[GiornataError]) -> T:
    """What the router answers; after the errors `again` it is asked again for `window_s`."""

    async def once() -> T:  # tenacity awaits what it knows to be a coroutine function
        return await ask()

    attempts = AsyncRetrying(
        retry=retry_if_exception_type(again),
        stop=stop_after_delay(window_s),
        wait=wait_exponential_jitter(multiplier=0.05, max=0.5),
        reraise=True,
    )
    return await attempts(once)


@dataclass(frozen=True)
class AwaitedJob:
    """An accepted job whose end a request waits for."""

    job: Job
    ended: asyncio.Future[None]
    deadline: Deadline


@dataclass(frozen=True)
class Submission:
    """Has jobs accepted by the router."""

    bus: Bus
    ledger: Ledger
    preparation: Preparation
    ends: JobEnds
    tasks: asyncio.TaskGroup
    """Owns what outlives a request: calls whose outcome must be known, and cancellations."""
    window_s: float
    """How long a submission is tried while no router answers."""
    sending: dict[str, asyncio.Task[GiornataError | None]] = field(default_factory=dict)
    """Submissions on their way, by job."""

    async def submit(self, prepared: Prepared) -> Job:
        """Make a job durable. If the caller is cancelled meanwhile, so is the job.

        Raises:
            GiornataError: why it was not accepted.
        """
        try:
            await self._send(prepared.job)
        except BaseException:
            self._call_off(prepared.job)
            raise
        return prepared.job

    @asynccontextmanager
    async def awaited(self, prepared: Prepared) -> AsyncIterator[AwaitedJob]:
        """A job that lives only as long as its request waits: leaving before it has ended cancels it."""
        job = prepared.job
        with self.ends.expect(job.job_id) as ended:
            try:
                await self._send(job)
                yield AwaitedJob(job, ended, prepared.deadline)
            finally:
                if not ended.done() or ended.exception() is not None:
                    self._call_off(job)

    async def outcome(self, awaited: AwaitedJob) -> JobRecord:
        """The terminal record of an awaited job.

        Raises:
            DeadlineExceeded: it has not ended in time.
            ServiceUnavailable: this gateway is shutting down.
        """
        try:
            async with asyncio.timeout(awaited.deadline.remaining_s()):
                await asyncio.shield(awaited.ended)
        except TimeoutError:
            log.info("deadline_exceeded", job_id=awaited.job.job_id)
        record = await self.ledger.records.get(awaited.job.job_id)
        if not record.state.terminal:
            raise DeadlineExceeded
        return record

    async def ask_router(self, job: Job) -> GiornataError | None:
        """Have `job` accepted, trying again while no router answers; why it was not. It raises nothing."""
        try:
            await answered(lambda: self._ask_once(job), self.window_s, ServiceUnavailable, DeadlineExceeded)
        except DeadlineExceeded:
            return ServiceUnavailable("The router did not accept the edit in time.", retry_after_s=2)
        except GiornataError as error:
            return error
        except Exception:  # the task's edge: logged and answered
            log.exception("submit_failed", job_id=job.job_id)
            return InternalError()
        asked = job.parameters
        log.info(
            "accepted",
            job_id=job.job_id,
            tenant=job.tenant,
            user=asked.user,
            n=asked.n,
            priority=job.priority.value,
        )
        return None

    async def _ask_once(self, job: Job) -> None:
        deadline = Deadline.after_ms(TRY_S * 1000)
        request = SubmitRequest(job=job, remaining_ms=deadline.remaining_ms())
        await self.bus.call(subjects.SUBMIT, request, Accepted, deadline)

    async def _send(self, job: Job) -> None:
        """Submit to the router. The call survives its caller, so that its outcome is always known."""
        sending = self.tasks.create_task(self.ask_router(job), name=f"submit-{job.job_id}")
        self.sending[job.job_id] = sending
        sending.add_done_callback(lambda _: self.sending.pop(job.job_id, None))
        error = await asyncio.shield(sending)
        if error is not None:
            raise error

    def _call_off(self, job: Job) -> None:
        """In the background, cancel a job whose requester has left, or forget its pictures if it was refused."""
        self.tasks.create_task(self._cancel_or_forget(job), name=f"call-off-{job.job_id}")

    async def _cancel_or_forget(self, job: Job) -> None:
        sending = self.sending.get(job.job_id)
        if sending is not None:
            await asyncio.wait([sending])
        try:
            await self.ledger.cancel(job.job_id)
        except JobNotFound:  # it was never accepted
            await self.preparation.forget(job)
        except Exception:  # the task's edge: logged; the job ends by its budget, the blobs expire
            log.exception("call_off_failed", job_id=job.job_id)
