"""One gateway from its start to its drain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Container
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import nats.errors
import structlog
from aiohttp import web

from giornata.blobs import BlobStore
from giornata.bus.bus import Bus
from giornata.bus.telemetry import publish, state_of, telemetry
from giornata.records.jobs import Records
from giornata.records.templates import TemplateRecords
from giornata.wire.errors import ServiceUnavailable
from giornata.wire.events import DoneEvent
from giornata.wire.workers import ServiceName, ServiceState
from giornata_gateway.config import GatewayConfig
from giornata_gateway.fleet.metrics import Metrics
from giornata_gateway.fleet.watch import FleetWatch
from giornata_gateway.gateway import Gateway
from giornata_gateway.http.app import build_app
from giornata_gateway.intake.key_file import KeyFile
from giornata_gateway.intake.memory import Memory
from giornata_gateway.intake.quotas import Quotas
from giornata_gateway.intake.rules.admission import Admission
from giornata_gateway.jobs.preparation import Preparation
from giornata_gateway.jobs.registration import Lives, Registration
from giornata_gateway.jobs.sharing import Sharing
from giornata_gateway.jobs.submission import Submission
from giornata_gateway.jobs.waiting import Waiting
from giornata_gateway.nats.door import open_door

log = structlog.get_logger(__name__)

CLOSE_S = 5.0
"""After the drain: how long answers that are being written may still take."""


async def serve(
    config: GatewayConfig, bus: Bus, blobs: BlobStore, records: Records, stop: asyncio.Event
) -> None:
    """Open both doors until `stop`; then give notice, listen no more, answer for at most `drain_s`, and leave.

    Leaving the doors is the drain: the NATS door stops listening and finishes its edits, the HTTP door answers whoever
    has come, and the cancellations of what nobody waits for are sent.
    """
    keys = None if config.api_keys_file is None else KeyFile(config.api_keys_file)
    fleet = FleetWatch(config.submit_window_s / 2)  # the other half is for who asks at the end of it
    templates = await TemplateRecords.open(bus.jetstream)
    async with asyncio.TaskGroup() as tasks, fleet.listening(bus):
        gateway = _compose(config, bus, blobs, records, templates, keys=keys, fleet=fleet, tasks=tasks)
        async with gateway.waiting.listening(bus, config.instance), _restoring(gateway, tasks):
            async with AsyncExitStack() as doors:
                http = await _open_http(gateway, doors)
                await doors.enter_async_context(open_door(gateway))
                await doors.enter_async_context(telemetry(bus, config.telemetry_hz, lambda: _state(gateway)))
                await stop.wait()
                await _give_notice(gateway)
                await http.stop(gateway.departure.asking)
                gateway.depart()
                last_call = asyncio.get_running_loop().call_later(config.drain_s, gateway.close)
            last_call.cancel()
    log.info("drained")


async def _give_notice(gateway: Gateway) -> None:
    """Say that this gateway leaves, and take requests until those who choose between gateways can have heard of it."""
    config = gateway.config
    others = gateway.fleet.has_another(config.instance)
    gateway.departure.announced.set()
    log.info("draining", rows=gateway.admission.taken, others=others)
    if gateway.bus.client.is_connected:
        await publish(gateway.bus, _state(gateway))
    if others:
        await asyncio.sleep(config.notice_s)  # balancers look in their own time, and tell nobody


@asynccontextmanager
async def _restoring(gateway: Gateway, tasks: asyncio.TaskGroup) -> AsyncIterator[None]:
    """After every reconnect make sure of the streams."""

    async def restore() -> None:
        try:
            await gateway.restore()
        except nats.errors.Error:  # JetStream is not back yet; whoever opens a feed tries again
            log.warning("restore_failed", exc_info=True)

    def reconnected() -> None:
        tasks.create_task(restore(), name="restore-streams")

    gateway.bus.on_reconnect.append(reconnected)
    try:
        yield
    finally:
        gateway.bus.on_reconnect.remove(reconnected)


def _compose(
    config: GatewayConfig,
    bus: Bus,
    blobs: BlobStore,
    records: Records,
    templates: TemplateRecords,
    *,
    keys: KeyFile | None,
    fleet: FleetWatch,
    tasks: asyncio.TaskGroup,
) -> Gateway:
    # the metrics count who waits, and waiting tells the metrics who has ended
    metrics = Metrics(fleet.states, lambda: len(waiting))
    admission = Admission(config.max_concurrent_rows)
    quotas = Quotas(admission.estimate_s, metrics.tenant_refused)

    def ended(event: DoneEvent, *, awaited: bool) -> None:
        metrics.job_ended(event, awaited=awaited)
        quotas.leave(event.job_id)

    waiting = Waiting(records, ended)
    preparation = Preparation(blobs, fleet, tasks, gateway=config.instance, result_ttl_s=config.result_ttl_s)
    submission = Submission(
        bus, records, preparation, waiting=waiting, tasks=tasks, window_s=config.submit_window_s
    )
    return Gateway(
        config=config,
        bus=bus,
        blobs=blobs,
        fleet=fleet,
        waiting=waiting,
        keys=keys,
        admission=admission,
        quotas=quotas,
        watchers=Admission(config.max_streams, "event streams"),
        uploads=Memory(config.max_held_bytes),
        answers=Memory(config.max_held_bytes),
        submission=submission,
        sharing=Sharing(
            bus,
            records,
            submission,
            waiting=waiting,
            tasks=tasks,
            gateway=config.instance,
            given_up=quotas.leave,
        ),
        registration=Registration(
            bus,
            blobs,
            templates,
            fleet,
            tasks=tasks,
            lives=Lives.of(config.template_ttl_s, config.job_budget_s),
            window_s=config.submit_window_s,
            most=config.max_templates,
        ),
        metrics=metrics,
    )


@dataclass(frozen=True)
class _Http:
    """The HTTP door, open."""

    runner: web.AppRunner
    site: web.TCPSite

    async def stop(self, asking: Container[asyncio.BaseTransport | None]) -> None:
        """Listen no more, and close the connections that are not `asking`.

        aiohttp's own `pre_shutdown` would read no more of a request whose body is still coming, and would leave the
        others open with nobody who answers on them.
        """
        await self.site.stop()
        await asyncio.sleep(0)  # as in aiohttp's own clean-up: what has been read begins before
        for connection in self.runner.server.connections if self.runner.server is not None else ():
            if connection.transport not in asking:
                connection.force_close()


async def _open_http(gateway: Gateway, stack: AsyncExitStack) -> _Http:
    """Listen; on leaving, answer whoever has come, then close."""
    config = gateway.config
    runner = web.AppRunner(
        build_app(gateway),
        handler_cancellation=True,
        shutdown_timeout=CLOSE_S,
        access_log=None,
        auto_decompress=False,  # a small body that unpacks to a large one is refused, see multipart
    )
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, config.host, config.port)
    try:
        await site.start()
    except OSError as error:
        raise ServiceUnavailable(
            f"The address {config.host}:{config.port} cannot be listened on: {error}."
        ) from error
    port = int(runner.addresses[0][1])
    if config.port_file is not None:
        config.port_file.write_text(f"{port}\n")
    stack.push_async_callback(_answer_all, gateway)
    log.info("listening", url=f"http://{config.host}:{port}", port=port)
    return _Http(runner, site)


async def _answer_all(gateway: Gateway) -> None:
    left = await gateway.departure.quiet(gateway.config.drain_s + CLOSE_S)
    if left:
        log.warning("requests_left_behind", requests=left)


def _state(gateway: Gateway) -> ServiceState:
    draining = gateway.departure.announced.is_set()
    return state_of(
        ServiceName.GATEWAY,
        gateway.config.instance,
        ready=not draining and gateway.bus.client.is_connected,
        draining=draining,
    )
