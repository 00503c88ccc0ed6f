"""Jobs with an idempotency key: every request with the same key is of one job, at whichever gateway it comes.

The key gives the job's id, and the job's record decides: who creates it first has given the job its content. Such a job
is nobody's alone, so that nobody's leaving calls it off; a client that lost its connection comes again for the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import nats.errors
import structlog

from giornata.blobs.protocol import refer
from giornata.bus.bus import Bus
from giornata.records.jobs import Records
from giornata.wire import subjects
from giornata.wire.errors import GiornataError, IdempotencyKeyReused, JobNotFound, ServiceUnavailable
from giornata.wire.events import DoneEvent, EventKind
from giornata.wire.jobs import BlobRef, Job
from giornata_gateway.intake.rules.idempotency import check_same, fingerprint, job_id_of
from giornata_gateway.jobs.preparation import Order, Prepared
from giornata_gateway.jobs.submission import Held, Submission
from giornata_gateway.jobs.waiting import Waiting

log = structlog.get_logger(__name__)


class Sharing:
    """Accepts jobs with a key, and lets requests join them.

    Args:
        bus: to other gateways' events.
        records: of all jobs.
        submission: to the router.
        waiting: for the ends of jobs.
        tasks: owns submissions, which outlive their requests.
        gateway: this instance.
        given_up: is told the id of a job that was not accepted as it was submitted.
    """

    def __init__(
        self,
        bus: Bus,
        records: Records,
        submission: Submission,
        *,
        waiting: Waiting,
        tasks: asyncio.TaskGroup,
        gateway: str,
        given_up: Callable[[str], None],
    ) -> None:
        self._bus, self._records, self._submission = bus, records, submission
        self._waiting, self._tasks, self._gateway, self._given_up = waiting, tasks, gateway, given_up

    async def known(self, order: Order) -> Prepared | None:
        """The job that was accepted under the order's key; None where there is no key, or no such job yet.

        Raises:
            IdempotencyKeyReused: there is one, of another edit.
        """
        if order.fingerprint is None:
            return None
        try:
            record = await self._records.get(order.job_id)
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
        accepting = self._tasks.create_task(self._accept(job), name=f"accept-{job.job_id}")
        outcome = await asyncio.shield(accepting)
        if isinstance(outcome, GiornataError):
            raise outcome
        return outcome

    @asynccontextmanager
    async def held(self, prepared: Prepared) -> AsyncIterator[Held]:
        """A job while somebody waits for it; leaving changes nothing for it."""
        job = await self.submit(prepared)
        async with AsyncExitStack() as stack:
            ended = stack.enter_context(self._waiting.expect(job.job_id))
            if job.gateway != self._gateway:  # whose events are heard there
                done = subjects.event(job.gateway, job.job_id, EventKind.DONE)
                await stack.enter_async_context(
                    self._bus.listen(done, DoneEvent, lambda event: self._waiting.wake(event.job_id))
                )
            if (await self._records.get(job.job_id)).state.terminal:
                self._waiting.wake(job.job_id)
            yield Held(job, ended, prepared.deadline)

    async def _accept(self, job: Job) -> Job | GiornataError:
        outcome = await self._outcome(job)
        if outcome is not job:
            self._given_up(job.job_id)
        return outcome

    async def _outcome(self, job: Job) -> Job | GiornataError:
        """Submit, and see whose job it became; forget the pictures of one that is not carried out.

        Where the router did not answer, it may still have accepted the job; then the pictures end by their time.
        """
        error = await self._submission.ask_router(job)
        if error is not None:
            if not isinstance(error, ServiceUnavailable):
                await self._submission.forget(job)
            return error
        try:
            standing = (await self._records.get(job.job_id)).job
        except (GiornataError, nats.errors.Error) as lost:
            log.warning("record_not_read", job_id=job.job_id, error=repr(lost))
            return ServiceUnavailable("The job's record cannot be read.", retry_after_s=1)
        if standing == job:
            return job
        await self._submission.forget(job)
        try:
            check_same(standing, job.fingerprint or "")
        except IdempotencyKeyReused as reused:
            return reused
        return standing


async def identified(order: Order, key: str | None) -> Order:
    """`order` with the job that its idempotency key leads to."""
    if key is None:
        return order
    image, mask = [None if data is None else await _sha256(data) for data in (order.image, order.mask)]
    asked = fingerprint(order.parameters, image, order.template_id, mask)
    return replace(order, job_id=job_id_of(order.tenant, key), fingerprint=asked)


async def _sha256(data: bytes | BlobRef) -> str:
    """A claim check says it; whoever reads the blob checks it."""
    return data.sha256 if isinstance(data, BlobRef) else (await refer("", data)).sha256
