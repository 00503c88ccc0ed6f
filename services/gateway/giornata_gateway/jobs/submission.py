"""From a prepared job to its end: submitted, accepted, awaited, and called off when its requester leaves.

A job with an idempotency key is shared: every request with the same key is about one job, at any gateway. The key gives
the job's id, and the job's record decides: the first to create it gives the job its content. Such a job belongs to all
its requests, so that none of them cancels it by leaving; a client that lost its connection comes again for the answer.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import nats.errors
import structlog
from nats.js.errors import NotFoundError

from giornata.bus.bus import Bus
from giornata.deadlines import Deadline, retry_patiently, retry_soon
from giornata.records import Change, JobRecordStore
from giornata.tracing import TraceSpanKind, span
from giornata.wire import subjects
from giornata.wire.errors import (
    DeadlineExceeded,
    GiornataError,
    IdempotencyKeyReused,
    InternalError,
    JobNotFound,
    ServiceUnavailable,
    StorageFull,
)
from giornata.wire.jobs import Job, JobRecord
from giornata.wire.messages import (
    CancelRows,
    DoneEvent,
    EventKind,
    JobAck,
    JobEstimate,
    JobEstimateRequest,
    SubmitRequest,
)
from giornata_gateway.admission import AdmissionSlot
from giornata_gateway.config import GatewayConfig
from giornata_gateway.fleet import FleetListener, StorageProbe
from giornata_gateway.jobs.events import StepEventBuffer, hearing
from giornata_gateway.jobs.preparation import EditOrder, JobPreparer, check_same

log = structlog.get_logger(__name__)

TRY_S = 2.0
"""How long one try of a submission waits for the router."""
FORECAST_MS = 500
"""How long an answer waits for the router's forecast."""
CHECK_WINDOW_S = 20.0
"""After a reconnect, how long the records are asked for until JetStream answers again."""


class JobLedger:
    """The jobs of all gateways, as their records tell. None is known before a router has made the records' bucket."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._records: JobRecordStore | None = None
        self._opening = asyncio.Lock()

    async def get(self, job_id: str) -> JobRecord:
        """A job's record; an unknown id raises JobNotFound."""
        return await self._asked(job_id, lambda records: records.get(job_id))

    async def change(self, job_id: str, change: Change[JobRecord]) -> JobRecord:
        """Change a record as in every bucket; JobNotFound as :meth:`get`."""
        return await self._asked(job_id, lambda records: records.change(job_id, change))

    async def _asked(self, job_id: str, ask: Callable[[JobRecordStore], Awaitable[JobRecord]]) -> JobRecord:
        try:
            async with self._opening:
                self._records = self._records or await JobRecordStore.open(self._bus.jetstream)
            return await ask(self._records)
        except NotFoundError as error:
            raise JobNotFound(received=job_id) from error

    async def read_of(self, tenant: str, job_id: str) -> JobRecord:
        """The record of a tenant's job; JobNotFound, too, where it is another tenant's, which is not told."""
        try:
            subjects.token(job_id)
        except ValueError as error:
            raise JobNotFound(received=job_id) from error
        record = await self.get(job_id)
        if record.job.tenant != tenant:
            raise JobNotFound(received=job_id)
        return record

    async def forecast(self, job_id: str) -> JobEstimate | None:
        """Return when a job should have its pictures; None where the router does not know or does not answer."""
        deadline = Deadline.after_ms(FORECAST_MS)
        request = JobEstimateRequest(job_id=job_id, remaining_ms=deadline.remaining_ms())
        try:
            return await self._bus.call(subjects.FORECAST, request, JobEstimate, deadline)
        except GiornataError as error:
            log.debug("no_estimate", job_id=job_id, error=str(error))
            return None

    async def cancel(self, job_id: str) -> JobRecord:
        """Ask for a job's end, in the record and by broadcast; a terminal job stays as it is. Raises JobNotFound."""
        record = await self.change(job_id, lambda record: record.model_copy(update={"cancel": True}))
        if not record.state.terminal:
            await self._bus.publish(subjects.cancel(job_id), CancelRows(job_id=job_id, attempt=0))
            log.info("cancel_requested", job_id=job_id)
        return record


class JobEnds:
    """Futures that resolve when a job is terminal; the record says how. `on_done` hears every end."""

    def __init__(self, ledger: JobLedger, on_done: Callable[[DoneEvent], None]) -> None:
        self._ledger, self._on_done = ledger, on_done
        self._futures: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self._watchers: set[asyncio.Future[None]] = set()
        self._watchable = True

    def hear(self, event: DoneEvent) -> None:
        """Wake the requests that wait for the event's job."""
        self._on_done(event)
        self.wake(event.job_id)

    @contextmanager
    def expect(self, job_id: str, *, watching: bool = False) -> Iterator[asyncio.Future[None]]:
        """A future that resolves when the job is terminal. Enter before the job can end.

        A caller that is `watching` only looks on and can go on doing so at another gateway.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures[job_id].add(future)
        if watching:
            self._watchers.add(future)
            if not self._watchable:
                self._leave(future)
        try:
            yield future
        finally:
            self._futures[job_id].discard(future)
            self._watchers.discard(future)
            if not self._futures[job_id]:
                del self._futures[job_id]
            if future.done() and not future.cancelled():
                future.exception()  # seen: a request that left early does not read it

    def __len__(self) -> int:
        """Jobs that a request waits for."""
        return len(self._futures)

    def __contains__(self, job_id: str) -> bool:
        """Return whether a request waits for the job."""
        return job_id in self._futures

    def abandon(self, *, watchers_only: bool = False) -> None:
        """Tell every waiting request that this gateway leaves, or those alone that look on, now or later."""
        self._watchable = False
        for futures in self._futures.values():
            for future in self._watchers.intersection(futures) if watchers_only else futures:
                self._leave(future)

    @staticmethod
    def _leave(future: asyncio.Future[None]) -> None:
        if not future.done():
            future.set_exception(ServiceUnavailable("This gateway is shutting down.", retry_after_s=1))

    def wake(self, job_id: str) -> None:
        """Wake the requests that wait for a job: it has ended."""
        for future in self._futures.get(job_id, ()):
            if not future.done():
                future.set_result(None)

    async def check(self) -> None:
        """Wake the requests whose job ended while its event could not be heard."""
        asking = retry_patiently(nats.errors.Error, CHECK_WINDOW_S)
        for job_id in list(self._futures):
            try:
                record: JobRecord = await asking(self._ledger.get, job_id)
            except JobNotFound:
                continue  # not accepted yet
            if record.state.terminal:
                self.wake(job_id)


@dataclass(frozen=True)
class AdmittedJob:
    """A job that may be submitted at once, and the places that its request holds. Its pictures are stored."""

    job: Job
    deadline: Deadline
    stay: AdmissionSlot
    known: bool = False
    """The job was accepted before, under the same idempotency key."""
    started_s: float = field(default_factory=time.monotonic)

    @property
    def shared(self) -> bool:
        """Return whether every request with the same idempotency key is about this job."""
        return self.job.fingerprint is not None

    def carried_out(self) -> None:
        """The edit is done. Its duration, unless it was repeated, tells refused requests when to come again."""
        self.stay.seconds = None if self.stay.repeated else time.monotonic() - self.started_s


@dataclass(frozen=True)
class AwaitedJob:
    """An accepted job whose end a request waits for."""

    job: Job
    ended: asyncio.Future[None]
    deadline: Deadline
    steps: StepEventBuffer | None = None
    """Since before the job was submitted, where its steps are told."""


@dataclass(frozen=True)
class JobSubmitter:
    """Has jobs accepted by the router, and lets requests with an idempotency key join them."""

    config: GatewayConfig
    bus: Bus
    fleet: FleetListener
    ledger: JobLedger
    storage: StorageProbe
    preparation: JobPreparer
    ends: JobEnds
    tasks: asyncio.TaskGroup
    """Owns what outlives a request: calls whose outcome must be known, and cancellations."""
    given_up: Callable[[str], None]
    """Is told the id of a shared job that was not accepted as it was submitted."""
    sending: dict[str, asyncio.Task[GiornataError | None]] = field(default_factory=dict)
    """Submissions on their way, by job."""
    doubtful: set[str] = field(default_factory=set)
    """Jobs that a router may have accepted without an answer; their pictures stay, though another router refuses."""

    async def known(self, order: EditOrder) -> Job | None:
        """The job that was accepted under the order's key, as :func:`check_same` allows; None without key or job."""
        if order.fingerprint is None:
            return None
        try:
            record = await self.ledger.get(order.job_id)
        except JobNotFound:
            return None
        check_same(record.job, order.fingerprint)
        return record.job

    async def submit(self, admitted: AdmittedJob, *, awaited: bool = False) -> Job:
        """Make a job durable; the job that is carried out, which may be another request's with the same key.

        A job without a key is cancelled if the caller is cancelled meanwhile; leaving cancels one that is `awaited`. A
        new job with a key outlives its request. What is raised says why the job was not accepted: IdempotencyKeyReused
        where another request was faster with another edit.
        """
        job, stay = admitted.job, admitted.stay
        stay.lasting = admitted.shared and not admitted.known
        if not admitted.shared:
            try:
                await self._send(job)
            except BaseException:
                self._call_off(job)
                raise
        elif not admitted.known:
            accepting = self.tasks.create_task(self._accept_shared(job), name=f"accept-{job.job_id}")
            outcome = await asyncio.shield(accepting)
            if isinstance(outcome, GiornataError):
                raise outcome
            job = outcome
        stay.repeated = admitted.known or job is not admitted.job
        stay.lasting = not stay.repeated and (admitted.shared or not awaited)
        return job

    @asynccontextmanager
    async def awaited(self, admitted: AdmittedJob, *, streamed: bool) -> AsyncIterator[AwaitedJob]:
        """A job while its request waits, `streamed` where its steps are told.

        Leaving before it has ended cancels it, unless it is shared.
        """
        job = admitted.job
        async with AsyncExitStack() as stack:
            steps = await stack.enter_async_context(hearing(self.bus, job.job_id)) if streamed else None
            ended = stack.enter_context(self.ends.expect(job.job_id))
            if admitted.shared:
                job = await self.submit(admitted, awaited=True)
                if job.gateway != self.config.instance:  # its events go to that gateway
                    done = subjects.event(job.gateway, job.job_id, EventKind.DONE)
                    heard = self.bus.listen(done, DoneEvent, lambda event: self.ends.wake(event.job_id))
                    await stack.enter_async_context(heard)
                if (await self.ledger.get(job.job_id)).state.terminal:
                    self.ends.wake(job.job_id)
            else:
                stack.callback(self._left, job, ended)
                await self._send(job)
            yield AwaitedJob(job, ended, admitted.deadline, steps)

    def _left(self, job: Job, ended: asyncio.Future[None]) -> None:
        if not ended.done() or ended.exception() is not None:
            self._call_off(job)

    async def outcome(self, awaited: AwaitedJob) -> JobRecord:
        """The terminal record of an awaited job.

        DeadlineExceeded is raised where it has not ended in time, ServiceUnavailable where this gateway shuts down.
        """
        try:
            async with asyncio.timeout(awaited.deadline.remaining_s()):
                await asyncio.shield(awaited.ended)
        except TimeoutError:
            log.info("deadline_exceeded", job_id=awaited.job.job_id)
        record = await self.ledger.get(awaited.job.job_id)
        if not record.state.terminal:
            raise DeadlineExceeded
        return record

    async def _accept_shared(self, job: Job) -> Job | GiornataError:
        outcome = await self._standing(job)
        if outcome is not job:
            self.given_up(job.job_id)
        return outcome

    async def _standing(self, job: Job) -> Job | GiornataError:
        """Submit, see which request's job the record holds, and forget the pictures of a job that is not carried out.

        A router that did not answer may still have accepted the job; then the pictures stay until they expire.
        """
        error = await self._ask_router(job)
        if error is not None:
            await self._forget_refused(job)
            return error
        try:
            standing = (await self.ledger.get(job.job_id)).job
        except (GiornataError, nats.errors.Error) as lost:
            log.warning("record_not_read", job_id=job.job_id, error=repr(lost))
            return ServiceUnavailable("The job's record cannot be read.", retry_after_s=1)
        if standing == job:
            return job
        await self.preparation.forget(job)
        try:
            check_same(standing, job.fingerprint or "")
        except IdempotencyKeyReused as reused:
            return reused
        return standing

    async def _ask_router(self, job: Job) -> GiornataError | None:
        """Have `job` accepted, trying again while no router answers; why it was not. It raises nothing.

        Where JetStream takes no job, nobody is asked, and nothing is tried again.
        """
        if not self.fleet.serves(job.model, job.model_digest):
            return ServiceUnavailable("The model is not served now.", retry_after_s=2)

        async def ask() -> GiornataError | None:
            deadline = Deadline.after_ms(TRY_S * 1000)
            request = SubmitRequest(job=job, remaining_ms=deadline.remaining_ms())
            try:
                with span("submit", TraceSpanKind.ASKS, job=job.job_id):
                    await self.bus.call(subjects.SUBMIT, request, JobAck, deadline)
            except (ServiceUnavailable, DeadlineExceeded, InternalError) as error:
                self.doubtful.add(job.job_id)
                if isinstance(error, StorageFull):
                    return error
                refusal = await self.storage.full_for_jobs(afresh=isinstance(error, DeadlineExceeded))
                if refusal is None:
                    raise
                return refusal
            return None

        try:
            full = await self.storage.full_for_jobs() or await retry_soon(
                (ServiceUnavailable, DeadlineExceeded), self.config.submit_window_s
            )(ask)
            if full is not None:
                return full
        except DeadlineExceeded:
            return ServiceUnavailable("The router did not accept the edit in time.", retry_after_s=2)
        except GiornataError as error:
            return error
        except Exception:  # the task's edge: logged and answered
            log.exception("submit_failed", job_id=job.job_id)
            self.doubtful.add(job.job_id)
            return InternalError()
        self.doubtful.discard(job.job_id)
        told = {
            "tenant": job.tenant,
            "user": job.parameters.user,
            "n": job.parameters.n,
            "task": job.task.value,
        }
        log.info("accepted", job_id=job.job_id, priority=job.priority.value, **told)
        return None

    async def _send(self, job: Job) -> None:
        """Submit to the router. The call survives its caller, so that its outcome is always known."""
        sending = self.tasks.create_task(self._ask_router(job), name=f"submit-{job.job_id}")
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
        except JobNotFound:  # it was not accepted, as far as is known
            await self._forget_refused(job)
        except Exception:  # the task's edge: logged; the job ends by its budget, the blobs expire
            log.exception("call_off_failed", job_id=job.job_id)
        finally:
            self.doubtful.discard(job.job_id)

    async def _forget_refused(self, job: Job) -> None:
        """Forget the pictures of a job that was not accepted; in doubt they stay until they expire.

        The first router that was asked may have queued the job and died, and the next one may have refused it.
        """
        if job.job_id in self.doubtful:
            self.doubtful.discard(job.job_id)
        else:
            await self.preparation.forget(job)
