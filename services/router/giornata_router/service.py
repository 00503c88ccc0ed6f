"""The router as a service: hears the fleet all the time, works while it holds the lease."""

from __future__ import annotations

import asyncio
import socket

import structlog

from giornata import __version__, streams, subjects
from giornata.bus import Bus, Endpoint
from giornata.events import DenoisedEvent, EventKind
from giornata.jobs import Priority
from giornata.messages import CancelRows, SubmitRequest
from giornata.records import Records
from giornata.telemetry import telemetry
from giornata.workers import ServiceName, ServiceState
from giornata_router.config import RouterConfig
from giornata_router.dispatch import Dispatch
from giornata_router.lease import Lease
from giornata_router.placement import Placement
from giornata_router.policy import POLICIES
from giornata_router.queue import Queue
from giornata_router.stages import Stages
from giornata_router.walk import Tools

RENEW_S = streams.LEASE_TTL_S / 3
"""How often the lease is renewed, and how often a standby looks whether it is free."""

log = structlog.get_logger(__name__)


class Router:
    """One router instance: active or standing by."""

    def __init__(self, bus: Bus, records: Records, config: RouterConfig) -> None:
        self._bus = bus
        self._config = config
        self._dispatch = Dispatch(Placement(POLICIES[config.policy]))
        self._queue = Queue(Tools(bus, records, Stages(bus, config), self._dispatch, config))
        self._active = False
        bus.on_reconnect.append(self._dispatch.recheck)

    async def run(self, stop: asyncio.Event) -> None:
        """Stand by, lead when the lease is free, until `stop`."""
        lease = await Lease.open(
            self._bus.client.jetstream(timeout=streams.LEASE_TTL_S / 2), self._config.instance
        )
        async with (
            self._bus.listen(subjects.ALL_TELEMETRY, ServiceState, self._dispatch.observe),
            telemetry(self._bus, self._config.telemetry_hz, self._report),
        ):
            while not stop.is_set():
                if await lease.acquire():
                    await self._lead(lease, stop)
                else:
                    await _wait(stop, RENEW_S)

    async def _lead(self, lease: Lease, stop: asyncio.Event) -> None:
        """Accept jobs and carry them out while the lease is ours; then unfinished jobs go back to the queue."""
        log.info("active")
        denoised = subjects.events_of_kind(EventKind.DENOISED)
        try:
            async with (
                self._bus.listen(denoised, DenoisedEvent, self._dispatch.report),
                self._bus.listen(subjects.ALL_CANCELS, CancelRows, self._queue.cancel),
                asyncio.TaskGroup() as tasks,
            ):
                self._start(tasks)
                async with self._bus.answer(Endpoint(subjects.SUBMIT, SubmitRequest, self._queue.submit)):
                    self._active = True
                    while not stop.is_set() and await lease.renew():
                        await _wait(stop, RENEW_S)
                raise _StepDownError  # noqa: TRY301 - a task group has no other way to cancel its tasks
        except* _StepDownError:
            pass
        finally:
            self._active = False
            await lease.release()
            log.info("stepped_down")

    def _start(self, tasks: asyncio.TaskGroup) -> None:
        limits = {Priority.INTERACTIVE: self._config.max_interactive, Priority.BATCH: self._config.max_batch}
        for priority, limit in limits.items():
            tasks.create_task(self._queue.consume(priority, limit, tasks), name=f"consume-{priority}")
        tasks.create_task(self._queue.renew(), name="renew")
        tasks.create_task(self._dispatch.watch_for_silence(), name="silence")

    def _report(self) -> ServiceState:
        return ServiceState(
            service=ServiceName.ROUTER,
            instance=self._config.instance,
            host=socket.gethostname(),
            version=__version__,
            ready=True,
            active=self._active,
        )


class _StepDownError(Exception):
    """Ends the task group of a router that no longer leads."""


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    """Until `stop` is set, at most `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return
