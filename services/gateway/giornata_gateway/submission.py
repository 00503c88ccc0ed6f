"""The path that both doors share: from validated parameters to an accepted job, and back out when nobody wants it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_exponential_jitter

from giornata import subjects
from giornata.blobs import BlobStore
from giornata.bus import Bus
from giornata.deadlines import Deadline
from giornata.errors import DeadlineExceeded, GiornataError, InternalError, JobNotFound, ServiceUnavailable
from giornata.jobs import BlobRef, Job, JobRecord, Priority
from giornata.messages import Accepted, CancelRows, SubmitRequest
from giornata.records import Records
from giornata.requests import MAX_SEED, EditParameters, resolve
from giornata_gateway.catalog import choose_card
from giornata_gateway.fleet_watch import FleetWatch
from giornata_gateway.waiting import Waiting

log = structlog.get_logger(__name__)

TRY_S = 2.0
"""How long one try of a submission waits for the router."""


@dataclass(frozen=True)
class Order:
    """An edit that somebody asked for, authenticated and well-formed."""

    parameters: EditParameters
    image: bytes | BlobRef
    mask: bytes | BlobRef | None
    tenant: str
    priority: Priority
    deadline: Deadline
    traceparent: str | None = None


@dataclass(frozen=True)
class Held:
    """An accepted job whose end somebody waits for."""

    job: Job
    ended: asyncio.Future[None]
    deadline: Deadline


@dataclass(frozen=True)
class Policy:
    """The part of the configuration that submissions need."""

    gateway: str
    result_ttl_s: int
    window_s: float
    """How long a submission is tried while no router answers."""


class Submission:
    """Accepts orders. `tasks` owns what must outlive a request: calls whose outcome must be known, cancellations."""

    def __init__(
        self,
        bus: Bus,
        blobs: BlobStore,
        records: Records,
        *,
        fleet: FleetWatch,
        waiting: Waiting,
        tasks: asyncio.TaskGroup,
        policy: Policy,
    ) -> None:
        self._bus = bus
        self._blobs = blobs
        self._records = records
        self._fleet = fleet
        self._waiting = waiting
        self._tasks = tasks
        self._policy = policy
        self._sending: dict[str, asyncio.Task[GiornataError | None]] = {}

    async def submit(self, order: Order) -> Job:
        """Make `order` a durable job. If the caller is cancelled meanwhile, so is the job.

        Raises:
            GiornataError: why it was not accepted.
        """
        job = await self._prepare(order)
        accepted = False
        try:
            await self._send(job)
            accepted = True
        finally:
            if not accepted:
                self.call_off(job)
        return job

    @asynccontextmanager
    async def held(self, order: Order) -> AsyncIterator[Held]:
        """A job that lives only as long as somebody waits: leaving before it has ended cancels it."""
        job = await self._prepare(order)
        with self._waiting.expect(job.job_id) as ended:
            try:
                await self._send(job)
                yield Held(job, ended, order.deadline)
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
                own = f"{job.tenant}/{job.job_id}/"
                await self._blobs.delete(
                    *(ref for ref in (job.image, job.mask) if ref and ref.key.startswith(own))
                )
        except Exception:  # the task's edge: logged; the job ends by its budget, the blobs by their time
            log.exception("call_off_failed", job_id=job.job_id)

    async def _prepare(self, order: Order) -> Job:
        """Resolve the parameters and store the pictures."""
        card = choose_card(self._fleet.cards(), order.parameters.model, self._fleet.missing())
        parameters = resolve(order.parameters, card, secrets.randbelow(MAX_SEED + 1))
        job_id = f"job_{secrets.token_urlsafe(18)}"
        budget_s = order.deadline.remaining_s()
        ttl_s = self._policy.result_ttl_s + int(budget_s) + 1
        image = await self._stored(order.image, f"{order.tenant}/{job_id}/image", ttl_s)
        mask = (
            None
            if order.mask is None
            else await self._stored(order.mask, f"{order.tenant}/{job_id}/mask", ttl_s)
        )
        return Job(
            job_id=job_id,
            tenant=order.tenant,
            gateway=self._policy.gateway,
            priority=order.priority,
            model=card.name,
            model_digest=card.digest,
            parameters=parameters,
            image=image,
            mask=mask,
            budget_ms=order.deadline.remaining_ms(),
            result_ttl_s=self._policy.result_ttl_s,
            traceparent=order.traceparent,
        )

    async def _stored(self, data: bytes | BlobRef, key: str, ttl_s: int) -> BlobRef:
        return data if isinstance(data, BlobRef) else await self._blobs.put(key, data, ttl_s)

    async def _send(self, job: Job) -> None:
        """Submit to the router; the call itself survives its caller, so that its outcome is always known."""
        sending = self._tasks.create_task(self._ask_router(job), name=f"submit-{job.job_id}")
        self._sending[job.job_id] = sending
        sending.add_done_callback(lambda _: self._sending.pop(job.job_id, None))
        error = await asyncio.shield(sending)
        if error is not None:
            raise error
        asked = job.parameters
        log.info(
            "accepted",
            job_id=job.job_id,
            tenant=job.tenant,
            user=asked.user,
            n=asked.n,
            priority=job.priority.value,
        )

    async def _ask_router(self, job: Job) -> GiornataError | None:
        try:
            attempts = AsyncRetrying(
                retry=retry_if_exception_type((ServiceUnavailable, DeadlineExceeded)),
                stop=stop_after_delay(self._policy.window_s),
                wait=wait_exponential_jitter(multiplier=0.05, max=0.5),
                reraise=True,
            )
            await attempts(self._ask_router_once, job)
        except DeadlineExceeded:
            return ServiceUnavailable("The router did not accept the edit in time.", retry_after_s=2)
        except GiornataError as error:
            return error
        except Exception:  # the task's edge: logged and answered
            log.exception("submit_failed", job_id=job.job_id)
            return InternalError()
        return None

    async def _ask_router_once(self, job: Job) -> None:
        deadline = Deadline.after_ms(TRY_S * 1000)
        request = SubmitRequest(job=job, remaining_ms=deadline.remaining_ms())
        await self._bus.call(subjects.SUBMIT, request, Accepted, deadline)
