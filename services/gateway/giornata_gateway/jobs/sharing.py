"""Jobs with an idempotency key: every request with the same key is about one job, at any gateway.

The key gives the job's id, and the job's record decides: the first to create it gives the job its content. Such a job
belongs to all its requests, so that none of them cancels it by leaving; a client that lost its connection comes again
for the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import nats.errors
import structlog

from giornata.wire import subjects
from giornata.wire.errors import GiornataError, IdempotencyKeyReused, JobNotFound, ServiceUnavailable
from giornata.wire.events import DoneEvent, EventKind
from giornata.wire.jobs import Job
from giornata_gateway.intake.rules.idempotency import check_same
from giornata_gateway.jobs.preparation import EditOrder, Prepared
from giornata_gateway.jobs.submission import AwaitedJob, Submission

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Sharing:
    """Has jobs with a key accepted, and lets requests join them."""

    submission: Submission
    gateway: str
    """This instance."""
    given_up: Callable[[str], None]
    """Is told the id of a job that was not accepted as it was submitted."""

    async def known(self, order: EditOrder) -> Prepared | None:
        """The job that was accepted under the order's key; None where there is no key, or no such job yet.

        Raises:
            IdempotencyKeyReused: the job is another edit.
        """
        if order.fingerprint is None:
            return None
        try:
            record = await self.submission.ledger.records.get(order.job_id)
        except JobNotFound:
            return None
        check_same(record.job, order.fingerprint)
        return Prepared(record.job, order.deadline, known=True)

    async def submit(self, prepared: Prepared) -> Job:
        """Have a job accepted; the job that has its key, which may be another request's.

        Raises:
            IdempotencyKeyReused: another request was faster with another edit.
            GiornataError: why it was not accepted.
        """
        if prepared.known:
            return prepared.job
        job = prepared.job
        accepting = self.submission.tasks.create_task(self._accept(job), name=f"accept-{job.job_id}")
        outcome = await asyncio.shield(accepting)
        if isinstance(outcome, GiornataError):
            raise outcome
        return outcome

    @asynccontextmanager
    async def awaited(self, prepared: Prepared) -> AsyncIterator[AwaitedJob]:
        """A job while a request waits for it; leaving changes nothing for it."""
        ends = self.submission.ends
        job = await self.submit(prepared)
        async with AsyncExitStack() as stack:
            ended = stack.enter_context(ends.expect(job.job_id))
            if job.gateway != self.gateway:  # its events go to that gateway
                done = subjects.event(job.gateway, job.job_id, EventKind.DONE)
                heard = self.submission.bus.listen(done, DoneEvent, lambda event: ends.wake(event.job_id))
                await stack.enter_async_context(heard)
            if (await self.submission.ledger.records.get(job.job_id)).state.terminal:
                ends.wake(job.job_id)
            yield AwaitedJob(job, ended, prepared.deadline)

    async def _accept(self, job: Job) -> Job | GiornataError:
        outcome = await self._outcome(job)
        if outcome is not job:
            self.given_up(job.job_id)
        return outcome

    async def _outcome(self, job: Job) -> Job | GiornataError:
        """Submit, see which request's job the record holds, and forget the pictures of a job that is not carried out.

        A router that did not answer may still have accepted the job; then the pictures stay until they expire.
        """
        forget = self.submission.preparation.forget
        error = await self.submission.ask_router(job)
        if error is not None:
            if not isinstance(error, ServiceUnavailable):
                await forget(job)
            return error
        try:
            standing = (await self.submission.ledger.records.get(job.job_id)).job
        except (GiornataError, nats.errors.Error) as lost:
            log.warning("record_not_read", job_id=job.job_id, error=repr(lost))
            return ServiceUnavailable("The job's record cannot be read.", retry_after_s=1)
        if standing == job:
            return job
        await forget(job)
        try:
            check_same(standing, job.fingerprint or "")
        except IdempotencyKeyReused as reused:
            return reused
        return standing
