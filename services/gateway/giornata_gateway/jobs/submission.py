"""The path that both doors share: from a prepared job to an accepted one, and back out when nobody wants it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from giornata import retries
from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.records.jobs import Records
from giornata.wire import subjects
from giornata.wire.errors import (
    DeadlineExceeded,
    GiornataError,
    InternalError,
    JobNotFound,
    ServiceUnavailable,
)
from giornata.wire.jobs import Job, JobRecord
from giornata.wire.messages import Accepted, CancelRows, Forecast, ForecastRequest, SubmitRequest
from giornata_gateway.jobs.preparation import Order, Preparation, Prepared
from giornata_gateway.jobs.waiting import Waiting

log = structlog.get_logger(__name__)

FORECAST_MS = 500
"""Nobody waits for longer to hear how long to wait."""
TRY_S = 2.0
"""How long one try of a submission waits for the router."""


@dataclass(frozen=True)
class Held:
    """An accepted job whose end somebody waits for."""

    job: Job
    ended: asyncio.Future[None]
    deadline: Deadline


class Submission:
    """Accepts jobs. `tasks` owns what must outlive a request: calls whose outcome must be known, cancellations."""

    def __init__(
        self,
        bus: Bus,
        records: Records,
        preparation: Preparation,
        *,
        waiting: Waiting,
        tasks: asyncio.TaskGroup,
        window_s: float,
    ) -> None:
        self._bus = bus
        self._records = records
        self._preparation = preparation
        self._waiting = waiting
        self._tasks = tasks
        self._window_s = window_s
        """How long a submission is tried while no router answers."""
        self._sending: dict[str, asyncio.Task[GiornataError | None]] = {}

    async def forget(self, job: Job) -> None:
        """Delete the pictures that were stored for a job that nobody carries out; what fails is logged."""
        try:
            await self._preparation.forget(job)
        except Exception:  # a task's edge: logged; the blobs end by their time
            log.exception("forget_failed", job_id=job.job_id)

    async def prepare(self, order: Order) -> Prepared:
        """A job of `order`, whose pictures lie in the blob store from here on; submit it at once.

        Raises:
            GiornataError: why the order is refused.
        """
        return await self._preparation.prepare(order)

    async def submit(self, job: Job) -> Job:
        """Make `job` durable, and answer it. If the caller is cancelled meanwhile, so is the job.

        Raises:
            GiornataError: why it was not accepted.
        """
        try:
            await self._send(job)
        except BaseException:
            self.call_off(job)
            raise
        return job

    @asynccontextmanager
    async def held(self, prepared: Prepared) -> AsyncIterator[Held]:
        """A job that lives only as long as somebody waits: leaving before it has ended cancels it."""
        job = prepared.job
        with self._waiting.expect(job.job_id) as ended:
            try:
                await self._send(job)
                yield Held(job, ended, prepared.deadline)
            finally:
                if not ended.done() or ended.exception() is not None:
                    self.call_off(job)

    async def outcome(self, held: Held) -> JobRecord:
        """The terminal record of a held job.

        Raises:
            DeadlineExceeded: it has not ended in time.
            ServiceUnavailable: this gateway is shutting down.
        """
        try:
            async with asyncio.timeout(held.deadline.remaining_s()):
                await asyncio.shield(held.ended)
        except TimeoutError:
            log.info("deadline_exceeded", job_id=held.job.job_id)
        record = await self._records.get(held.job.job_id)
        if not record.state.terminal:
            raise DeadlineExceeded
        return record

    async def read(self, job_id: str) -> JobRecord:
        """The record of a job that this gateway holds."""
        return await self._records.get(job_id)

    async def record(self, job_id: str, tenant: str) -> JobRecord:
        """The record of a tenant's job.

        Raises:
            JobNotFound: there is none, or it is somebody else's, which is not told.
        """
        try:
            subjects.token(job_id)
        except ValueError as error:
            raise JobNotFound(received=job_id) from error
        record = await self._records.get(job_id)
        if record.job.tenant != tenant:
            raise JobNotFound(received=job_id)
        return record

    async def forecast(self, record: JobRecord) -> Forecast | None:
        """When a job should have its pictures; None where that is over, or unknown, or the router is away."""
        return None if record.state.terminal else await self.forecast_of(record.job.job_id)

    async def forecast_of(self, job_id: str) -> Forecast | None:
        """The same of a job that was just accepted."""
        deadline = Deadline.after_ms(FORECAST_MS)
        request = ForecastRequest(job_id=job_id, remaining_ms=deadline.remaining_ms())
        try:
            return await self._bus.call(subjects.FORECAST, request, Forecast, deadline)
        except GiornataError as error:
            log.debug("no_forecast", job_id=job_id, error=str(error))
            return None

    async def cancel(self, job_id: str) -> JobRecord:
        """Ask for a job's end, in the record and by broadcast; a terminal job stays as it is."""
        record = await self._records.change(job_id, lambda record: record.model_copy(update={"cancel": True}))
        if not record.state.terminal:
            await self._bus.publish(subjects.cancel(job_id), CancelRows(job_id=job_id, attempt=0))
            log.info("cancel_requested", job_id=job_id)
        return record

    def call_off(self, job: Job) -> None:
        """Cancel a job that nobody waits for any more, or forget its pictures if it was refused; in the background."""
        self._tasks.create_task(self._call_off(job), name=f"call-off-{job.job_id}")

    async def _call_off(self, job: Job) -> None:
        sending = self._sending.get(job.job_id)
        if sending is not None:
            await asyncio.wait([sending])
        try:
            try:
                await self.cancel(job.job_id)
            except JobNotFound:  # it was never accepted
                await self._preparation.forget(job)
        except Exception:  # the task's edge: logged; the job ends by its budget, the blobs by their time
            log.exception("call_off_failed", job_id=job.job_id)

    async def _send(self, job: Job) -> None:
        """Submit to the router; the call itself survives its caller, so that its outcome is always known."""
        sending = self._tasks.create_task(self.ask_router(job), name=f"submit-{job.job_id}")
        self._sending[job.job_id] = sending
        sending.add_done_callback(lambda _: self._sending.pop(job.job_id, None))
        error = await asyncio.shield(sending)
        if error is not None:
            raise error

    async def ask_router(self, job: Job) -> GiornataError | None:
        """Have `job` accepted, trying again while no router answers; why it was not. It raises nothing."""
        try:
            attempts = retries.soon((ServiceUnavailable, DeadlineExceeded), self._window_s)
            await attempts(self._ask_router_once, job)
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

    async def _ask_router_once(self, job: Job) -> None:
        deadline = Deadline.after_ms(TRY_S * 1000)
        request = SubmitRequest(job=job, remaining_ms=deadline.remaining_ms())
        await self._bus.call(subjects.SUBMIT, request, Accepted, deadline)
