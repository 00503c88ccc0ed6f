"""The router as a service: hears the fleet all the time, works while it holds the lease."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

import nats.errors
import structlog
from pydantic import BaseModel

from giornata.blobs import BlobStore
from giornata.bus import streams
from giornata.bus.bus import Bus, Endpoint, state_of, telemetry
from giornata.bus.connection import keep_looking, read_just_made
from giornata.deadlines import Deadline
from giornata.fleet import ListeningClock
from giornata.records import JobRecordStore, Quarantine, TemplateRecords
from giornata.scheduling.demand import JobDemand, RowShape
from giornata.scheduling.placement import Placement, StallTimeout
from giornata.scheduling.policies import POLICIES, PolicyName
from giornata.scheduling.queue import FairQueue
from giornata.scheduling.scheduler import QueueOrderScheduler
from giornata.wire import subjects, templates
from giornata.wire.errors import DeadlineExceeded, InternalError, Overloaded, ServiceUnavailable
from giornata.wire.messages import (
    CancelRows,
    DenoisedEvent,
    EventKind,
    JobAck,
    JobEstimateRequest,
    RecordRequest,
    RunAnswer,
    SubmitRequest,
    TemplateRequest,
)
from giornata.wire.subjects import LEASES
from giornata.wire.templates import TemplateRecord
from giornata.wire.workers import FleetRequest, ServiceName, ServiceState, TelemetryReader
from giornata_router.admission import FinishTimeEstimator, StreamCapacity
from giornata_router.config import RouterConfig
from giornata_router.dispatch import RUN_REPLY_S, Dispatch, RouterContext
from giornata_router.fleet_reports import FleetReporter
from giornata_router.job_queue import LeaderJobQueue
from giornata_router.leadership import (
    RENEW_S,
    Leadership,
    Lease,
    LeaseEndedError,
    WorkerClient,
)
from giornata_router.lora_placement import LoraPlacementPlanner
from giornata_router.prepost import PrepostClient, PrepostRequests, StagePlacement

Request = TypeVar("Request", bound=BaseModel)
Reply = TypeVar("Reply", bound=BaseModel)

log = structlog.get_logger(__name__)


class Router:
    """One router instance: active or standing by."""

    def __init__(
        self,
        bus: Bus,
        blobs: BlobStore,
        records: JobRecordStore,
        quarantine: Quarantine,
        config: RouterConfig,
    ) -> None:
        self._bus, self._config = bus, config
        placement = Placement(StallTimeout(config.stall_factor, config.stall_s * 1e3))
        line = FairQueue(by_deadline=config.policy is PolicyName.DEADLINE_AWARE, ageing_s=config.ageing_s)
        self._leadership, self._clock = Leadership(), ListeningClock()

        def connected() -> bool:
            return bus.client.is_connected

        def listened_s() -> float:
            return self._clock.listened_s

        self._dispatch = Dispatch(
            QueueOrderScheduler(POLICIES[config.policy]), placement, line, connected, listened_s
        )
        stages = StagePlacement(
            placement.fleet,
            by_deadline=config.policy is PolicyName.DEADLINE_AWARE,
            ageing_s=config.ageing_s,
        )
        questions = PrepostRequests(connected, listened_s)
        self._prepost = PrepostClient(bus, questions, stages, config.stage_s)
        forecasting = FinishTimeEstimator(placement, line, stages)
        self._room = StreamCapacity(bus.jetstream)
        self._tools = RouterContext(
            bus,
            replace(records, may_write=self._leadership.check),
            self._prepost,
            self._dispatch,
            forecasting,
            quarantine,
            self._room,
            config,
            WorkerClient(bus, self._leadership),
            self._leadership,
            blobs,
        )
        self._queue: LeaderJobQueue | None = None
        """What is led; None on a standby."""
        self._desk = FleetReporter(bus, placement.fleet, config.instance)
        self._places = LoraPlacementPlanner(bus, placement, config)
        bus.on_reconnect.append(self._dispatch.recheck)

    async def run(self, stop: asyncio.Event) -> None:
        """Stand by, lead when the lease is free, until `stop`."""
        jetstream = self._bus.client.jetstream(timeout=streams.LEASE_TTL_S / 2)
        leases = await read_just_made(partial(jetstream.key_value, LEASES))
        lease = Lease(jetstream, leases, self._config.instance, self._leadership)
        async with (
            self._bus.listen(
                subjects.TELEMETRY, ServiceState, self._hear, TelemetryReader().read
            ) as listening,
            telemetry(self._bus, self._config.telemetry_hz, self._report),
            asyncio.TaskGroup() as tasks,
        ):
            # a standby looks, too, and takes over with none but live workers
            looking = tasks.create_task(keep_looking(listening, self._clock, self._look), name="silence")
            while not stop.is_set():
                wait_s = await lease.acquire()
                if self._leadership.leads:
                    await self._lead(lease, stop)
                    wait_s = RENEW_S
                await _wait(stop, wait_s)
            looking.cancel()

    def _hear(self, state: ServiceState) -> None:
        self._dispatch.observe(state)
        self._prepost.observe(state, self._clock.listened_s)
        self._desk.rates.observe(state, time.monotonic())
        self._places.observe(state)

    def _look(self) -> None:
        self._dispatch.look(self._clock.listened_s)
        self._prepost.look(self._clock.listened_s)
        self._desk.rates.keep({state.instance for state in self._dispatch.placement.fleet.all()})
        self._places.look()

    async def _lead(self, lease: Lease, stop: asyncio.Event) -> None:
        """Accept jobs and carry them out while the lease is ours, and NATS answers."""
        log.info("active")
        try:
            await self._work(lease, stop)
        except* (_StepDownError, LeaseEndedError):
            pass
        except* nats.errors.Error as group:
            log.warning("leading_interrupted", error=repr(group.exceptions))
        finally:
            self._queue = None
            await lease.release()
            log.info("stepped_down")

    async def _work(self, lease: Lease, stop: asyncio.Event) -> None:
        """Lead; then, in this order, take no more jobs, leave unfinished ones in the queue, and stop answering."""
        walks = asyncio.TaskGroup()
        queue = LeaderJobQueue(self._tools, walks, self._leadership.check())
        template = partial(register, self._tools, await TemplateRecords.open(self._bus.jetstream))
        endpoints = (
            Endpoint(subjects.SUBMIT, SubmitRequest, self._by_holder(partial(self._submit, queue))),
            Endpoint(subjects.FORECAST, JobEstimateRequest, self._by_holder(queue.forecast)),
            Endpoint(subjects.FLEET, FleetRequest, self._by_holder(self._desk.page)),
            Endpoint(subjects.TEMPLATE, TemplateRequest, self._by_holder(template)),
        )
        denoised = subjects.events_of_kind(EventKind.DENOISED)
        async with (
            self._bus.listen(denoised, DenoisedEvent, self._dispatch.report),
            self._bus.answer(*endpoints),
            walks,
            self._bus.listen(subjects.ALL_CANCELS, CancelRows, queue.cancel),
            asyncio.TaskGroup() as pulls,
        ):
            pulls.create_task(self._room.watch(), name="room")
            pulls.create_task(self._desk.tell(self._leadership, queue.waits_ms), name="summary")
            pulls.create_task(queue.run(), name="queue")
            pulls.create_task(self._places.run(self._leadership), name="placement")
            self._bus.on_reconnect.append(queue.recheck)
            try:
                self._queue = queue
                while not stop.is_set() and await lease.renew():
                    await _wait(stop, RENEW_S)
            finally:
                self._bus.on_reconnect.remove(queue.recheck)
            raise _StepDownError  # a task group has no other way to cancel its tasks

    async def _submit(self, queue: LeaderJobQueue, request: SubmitRequest) -> JobAck:
        """Endpoint ``giornata.router.submit``: see :meth:`giornata_router.job_queue.LeaderJobQueue.submit`."""
        accepted = await queue.submit(request)
        self._places.see(lora.sha256 for lora in request.job.loras if lora.scale)
        return accepted

    def _by_holder(
        self, handler: Callable[[Request], Awaitable[Reply]]
    ) -> Callable[[Request], Awaitable[Reply]]:
        """`handler`, but there is no answer, not even an error, if the lease has ended before the answer is given."""

        async def answer(request: Request) -> Reply:
            self._leadership.check()
            try:
                return await handler(request)
            finally:
                self._leadership.check()

        return answer

    def _report(self) -> ServiceState:
        queue = self._queue and self._queue.state()
        return state_of(
            ServiceName.ROUTER,
            self._config,
            active=queue is not None and self._leadership.leads,
            queue=queue,
            stores=None if queue is None else self._room.stores,
        )


async def register(
    tools: RouterContext, records: TemplateRecords, request: TemplateRequest
) -> TemplateRecord:
    """Endpoint ``giornata.router.template``: the record, once a worker is recording; the worker tells it how that ends.

    Raises:
        BadRequest: or a kind of it: the picture cannot be a template.
        ServiceUnavailable: no worker takes it.
        TemplateNotFound: it was deleted meanwhile.
    """
    template, deadline = request.template, Deadline.after_ms(request.remaining_ms)
    inputs = await tools.prepost.template(template, deadline)
    tokens = inputs.inspection.tokens
    # one row; the worker chooses its number of steps, and no job waits for it
    demand = JobDemand(template.model, template.model_digest, (RowShape(0, tokens, tokens, steps=1),))
    tried: set[str] = set()
    while worker := tools.dispatch.placement.soonest(demand, tried):
        tried.add(worker)
        # the record names the worker before it is asked, since it may be done before it has answered
        recording = partial(templates.recording, worker=worker, inspection=inputs.inspection)
        tools.leadership.check()
        record = await records.change(template.tenant, template.template_id, recording)
        limit = deadline.at_most(RUN_REPLY_S)
        question = RecordRequest(template=record, inputs=inputs, remaining_ms=limit.remaining_ms())
        try:
            reply = await tools.workers.record(worker, question, limit)
        except (Overloaded, DeadlineExceeded, InternalError) as error:
            log.warning("worker_unreachable", template=record.template_id, worker=worker, error=str(error))
            deadline.check()
        else:
            if reply.answer is RunAnswer.ACCEPTED:
                return record
    raise ServiceUnavailable("No denoiser takes the template now.", retry_after_s=2)


class _StepDownError(Exception):
    """Ends the task groups of a router that no longer leads."""


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    """Until `stop` is set, at most `seconds`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()
