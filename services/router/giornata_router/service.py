"""The router as a service: hears the fleet all the time, works while it holds the lease."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from functools import partial

import nats.errors
import structlog
from nats.js.kv import KeyValue

from giornata.bus import streams
from giornata.bus.bus import Bus, Endpoint
from giornata.bus.telemetry import state_of, telemetry
from giornata.records import Quarantine, Records, TemplateRecords
from giornata.scheduling.line import Line
from giornata.scheduling.placement import Patience, Placement
from giornata.scheduling.policies import PolicyName
from giornata.scheduling.scheduler import SCHEDULERS
from giornata.wire import subjects
from giornata.wire.events import DenoisedEvent, EventKind
from giornata.wire.fleet import FleetRequest
from giornata.wire.jobs import Priority
from giornata.wire.messages import CancelRows, ForecastRequest, SubmitRequest, TemplateRequest
from giornata.wire.stores import LEASES
from giornata.wire.workers import ServiceName, ServiceState
from giornata_router.config import RouterConfig
from giornata_router.dispatch import Dispatch
from giornata_router.fleet_desk import FleetDesk
from giornata_router.prepost import PrepostClient, Questions
from giornata_router.queue import Queue
from giornata_router.registrar import register
from giornata_router.rules.forecasting import Forecasting
from giornata_router.tools import Tools

RENEW_S = streams.LEASE_TTL_S / 3
"""How often the lease is renewed, and how often a standby looks whether it is free."""

LOOK_S = 0.25
"""How often silence is looked for; a timer, since silence raises no event."""

LEASE = "router"

log = structlog.get_logger(__name__)


class Lease:
    """The key in `bucket` that makes one router active; it expires unless its holder renews it."""

    def __init__(self, bucket: KeyValue, holder: str) -> None:
        self._bucket, self._holder = bucket, holder.encode()
        self._revision: int | None = None

    async def acquire(self) -> bool:
        """Take the lease if no router holds it."""
        try:
            self._revision = await self._bucket.create(LEASE, self._holder)
        except nats.errors.Error:
            return False
        return True

    async def renew(self) -> bool:
        """Hold on for another time to live; False if that is not certain."""
        try:
            self._revision = await self._bucket.update(LEASE, self._holder, last=self._revision)
        except nats.errors.Error as error:
            log.warning("lease_not_renewed", error=repr(error))
            return False
        return True

    async def release(self) -> None:
        """Give the lease up, so that the next router takes over at once instead of after the time to live."""
        try:
            await self._bucket.delete(LEASE, last=self._revision)
        except nats.errors.Error as error:
            log.warning("lease_not_released", error=repr(error))


class Router:
    """One router instance: active or standing by."""

    def __init__(self, bus: Bus, records: Records, quarantine: Quarantine, config: RouterConfig) -> None:
        self._bus, self._config = bus, config
        placement = Placement(Patience(config.stall_factor, config.stall_s * 1e3))
        line = Line(by_deadline=config.policy is PolicyName.DEADLINE_AWARE, ageing_s=config.ageing_s)
        self._questions = Questions(placement.fleet, lambda: bus.client.is_connected)
        self._dispatch = Dispatch(SCHEDULERS[config.policy], placement, line, lambda: bus.client.is_connected)
        prepost = PrepostClient(bus, self._questions, config)
        forecasting = Forecasting(placement, line, config.max_wait_s or math.inf)
        self._tools = Tools(bus, records, prepost, self._dispatch, forecasting, quarantine, config)
        self._queue: Queue | None = None
        """What is led; None on a standby."""
        self._desk = FleetDesk(bus, placement.fleet, config.instance)
        bus.on_reconnect.append(self._dispatch.recheck)

    async def run(self, stop: asyncio.Event) -> None:
        """Stand by, lead when the lease is free, until `stop`."""
        jetstream = self._bus.client.jetstream(timeout=streams.LEASE_TTL_S / 2)
        lease = Lease(await jetstream.key_value(LEASES), self._config.instance)
        async with (
            self._bus.listen(subjects.ALL_TELEMETRY, ServiceState, self._hear),
            telemetry(self._bus, self._config.telemetry_hz, self._report),
            asyncio.TaskGroup() as tasks,
        ):
            looking = tasks.create_task(self._look(), name="silence")
            while not stop.is_set():
                if await lease.acquire():
                    await self._lead(lease, stop)
                await _wait(stop, RENEW_S)
            looking.cancel()

    def _hear(self, state: ServiceState) -> None:
        self._dispatch.observe(state)
        self._questions.observe(state, time.monotonic())
        self._desk.observe(state, time.monotonic())

    async def _look(self) -> None:
        """Look for silence for ever; a standby does so too, and takes over with none but live workers."""
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            self._dispatch.look(now)
            self._questions.look(now)
            self._desk.look()

    async def _lead(self, lease: Lease, stop: asyncio.Event) -> None:
        """Accept jobs and carry them out while the lease is ours, and NATS answers."""
        log.info("active")
        try:
            await self._work(lease, stop)
        except* _StepDownError:
            pass
        except* nats.errors.Error as group:
            log.warning("leading_interrupted", error=repr(group.exceptions))
        finally:
            self._queue = None
            await lease.release()
            log.info("stepped_down")

    async def _work(self, lease: Lease, stop: asyncio.Event) -> None:
        """Lead; then, in this order, take no more jobs, hand unfinished ones back to the queue, and stop answering."""
        walks = asyncio.TaskGroup()
        queue = Queue(self._tools, walks)
        template = partial(register, self._tools, await TemplateRecords.open(self._bus.jetstream))
        endpoints = (
            Endpoint(subjects.SUBMIT, SubmitRequest, queue.submit),
            Endpoint(subjects.FORECAST, ForecastRequest, queue.forecast),
            Endpoint(subjects.FLEET, FleetRequest, self._desk.page),
            Endpoint(subjects.TEMPLATE, TemplateRequest, template),
        )
        denoised = subjects.events_of_kind(EventKind.DENOISED)
        limits = {Priority.INTERACTIVE: self._config.max_interactive, Priority.BATCH: self._config.max_batch}
        async with (
            self._bus.listen(denoised, DenoisedEvent, self._dispatch.report),
            self._bus.answer(*endpoints),
            walks,
            self._bus.listen(subjects.ALL_CANCELS, CancelRows, queue.cancel),
            asyncio.TaskGroup() as pulls,
        ):
            pulls.create_task(queue.renew(), name="renew")
            pulls.create_task(self._desk.tell(), name="summary")
            for priority, limit in limits.items():
                pulls.create_task(queue.consume(priority, limit), name=f"consume-{priority}")
            self._bus.on_reconnect.append(queue.recheck)
            try:
                self._queue = queue
                while not stop.is_set() and await lease.renew():
                    await _wait(stop, RENEW_S)
            finally:
                self._bus.on_reconnect.remove(queue.recheck)
            raise _StepDownError  # a task group has no other way to cancel its tasks

    def _report(self) -> ServiceState:
        queue = self._queue and self._tools.forecasting.queue(full=self._queue.full)
        return state_of(ServiceName.ROUTER, self._config.instance, active=queue is not None, queue=queue)


class _StepDownError(Exception):
    """Ends the task groups of a router that no longer leads."""


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    """Until `stop` is set, at most `seconds`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()
