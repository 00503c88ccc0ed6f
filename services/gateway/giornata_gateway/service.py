"""One gateway from its start to its drain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import nats.errors
import structlog

from giornata.blobs import BlobStore
from giornata.bus.bus import Bus
from giornata.bus.telemetry import publish, state_of, telemetry
from giornata.records import Records, TemplateRecords
from giornata.wire.events import DoneEvent
from giornata.wire.workers import ServiceName, ServiceState
from giornata_gateway.config import GatewayConfig
from giornata_gateway.fleet.metrics import Metrics
from giornata_gateway.fleet.watch import FleetListener
from giornata_gateway.gateway import Gateway
from giornata_gateway.http.server import listening
from giornata_gateway.intake.key_file import KeyFile
from giornata_gateway.intake.memory import Memory
from giornata_gateway.intake.quotas import Quotas
from giornata_gateway.intake.rules.places import Places
from giornata_gateway.jobs.ends import JobEnds
from giornata_gateway.jobs.ledger import JobLedger
from giornata_gateway.jobs.preparation import Preparation
from giornata_gateway.jobs.registration import Registration
from giornata_gateway.jobs.submission import Submission
from giornata_gateway.nats.door import open_door

log = structlog.get_logger(__name__)


async def serve(
    config: GatewayConfig, bus: Bus, blobs: BlobStore, records: Records, stop: asyncio.Event
) -> None:
    """Open both doors until `stop`; then give notice, listen no more, answer for at most `drain_s`, and leave.

    Leaving the doors is the drain: the NATS door stops listening and finishes its edits, the HTTP door answers every
    request that has come, and the cancellations of abandoned jobs are sent.
    """
    keys = None if config.api_keys_file is None else KeyFile(config.api_keys_file)
    fleet = FleetListener(
        config.submit_window_s / 2
    )  # the other half is for a request at the end of the first
    templates = await TemplateRecords.open(bus.jetstream)
    async with asyncio.TaskGroup() as tasks, fleet.listening(bus):
        gateway = _compose(
            config, bus, blobs, records, templates=templates, keys=keys, fleet=fleet, tasks=tasks
        )
        async with gateway.ends.listening(bus, config.instance), _restoring(gateway, tasks):
            async with AsyncExitStack() as doors:
                stop_listening = await doors.enter_async_context(listening(gateway))
                await doors.enter_async_context(open_door(gateway))
                await doors.enter_async_context(telemetry(bus, config.telemetry_hz, lambda: _state(gateway)))
                await stop.wait()
                await _give_notice(gateway)
                await stop_listening()
                gateway.depart()
                last_call = asyncio.get_running_loop().call_later(config.drain_s, gateway.close)
            last_call.cancel()
    log.info("drained")


async def _give_notice(gateway: Gateway) -> None:
    """Say that this gateway leaves, and take requests until balancers can have heard of it."""
    config = gateway.config
    others = gateway.fleet.has_another(config.instance)
    gateway.departure.announced.set()
    log.info("draining", rows=gateway.places.taken, others=others)
    if gateway.bus.client.is_connected:
        await publish(gateway.bus, _state(gateway))
    if others:
        await asyncio.sleep(config.notice_s)  # balancers look in their own time and do not say when


@asynccontextmanager
async def _restoring(gateway: Gateway, tasks: asyncio.TaskGroup) -> AsyncIterator[None]:
    """Make sure of the streams after every reconnect."""

    async def restore() -> None:
        try:
            await gateway.restore()
        except nats.errors.Error:  # JetStream is not back yet; the next feed that opens tries again
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
    *,
    templates: TemplateRecords,
    keys: KeyFile | None,
    fleet: FleetListener,
    tasks: asyncio.TaskGroup,
) -> Gateway:
    def ended(event: DoneEvent, *, awaited: bool) -> None:
        metrics.job_ended(event, awaited=awaited)
        quotas.leave(event.job_id)

    ends, ledger = JobEnds(records, ended), JobLedger(bus, records)
    metrics = Metrics(fleet.states, lambda: len(ends))
    places = Places(config.max_concurrent_rows)
    quotas = Quotas(places.estimate_s, metrics.tenant_refused)
    preparation = Preparation(config, blobs, fleet, tasks)
    submission = Submission(config, bus, ledger, preparation, ends, tasks, quotas.leave)
    return Gateway(
        config=config,
        bus=bus,
        blobs=blobs,
        fleet=fleet,
        keys=keys,
        places=places,
        quotas=quotas,
        watchers=Places(config.max_streams, "event streams"),
        uploads=Memory(config.max_held_bytes),
        answers=Memory(config.max_held_bytes),
        ledger=ledger,
        ends=ends,
        preparation=preparation,
        submission=submission,
        registration=Registration(config, bus, blobs, templates, fleet, tasks),
        metrics=metrics,
    )


def _state(gateway: Gateway) -> ServiceState:
    draining = gateway.departure.announced.is_set()
    return state_of(
        ServiceName.GATEWAY,
        gateway.config.instance,
        ready=not draining and gateway.bus.client.is_connected,
        draining=draining,
    )
