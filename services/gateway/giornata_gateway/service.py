"""One gateway from its start to its drain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import structlog

from giornata.blobs import BlobStore
from giornata.bus.bus import Bus, publish_state, telemetry
from giornata.bus.connection import read_just_made
from giornata.records import LoraRecords, TemplateRecords, WebhookRecords
from giornata.wire import subjects
from giornata.wire.messages import DoneEvent, EventKind
from giornata.wire.workers import FleetSummary
from giornata_gateway.admission import KeyFile
from giornata_gateway.config import GatewayConfig, aliases_in
from giornata_gateway.fleet import FleetListener
from giornata_gateway.gateway import Gateway
from giornata_gateway.http.server import listening
from giornata_gateway.nats_door import open_door

log = structlog.get_logger(__name__)


async def serve(config: GatewayConfig, bus: Bus, blobs: BlobStore, stop: asyncio.Event) -> None:
    """Open both doors until `stop`; then give notice, listen no more, answer for at most `drain_s`, and leave.

    Leaving the doors is the drain: the NATS door stops listening and finishes its edits, the HTTP door answers every
    request that has come, and the cancellations of abandoned jobs are sent.
    """
    keys = None if config.api_keys_file is None else KeyFile(config.api_keys_file)
    bridged_s = config.submit_window_s / 2  # the other half is for a request at the end of the first
    fleet = FleetListener(bridged_s, aliases_in(config.model_aliases))
    templates = await read_just_made(partial(TemplateRecords.open, bus.jetstream))
    loras = await read_just_made(partial(LoraRecords.open, bus.jetstream))
    webhooks = await read_just_made(partial(WebhookRecords.open, bus.jetstream))
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        await stack.enter_async_context(bus.listen(subjects.SUMMARY, FleetSummary, fleet.hear))
        gateway = Gateway(
            config,
            bus,
            blobs,
            templates=templates,
            loras=loras,
            webhooks=webhooks,
            fleet=fleet,
            keys=keys,
            tasks=tasks,
        )
        done = subjects.events_of_gateway(config.instance, EventKind.DONE)
        async with (
            _catching_up(gateway),
            gateway.webhooks.sending(),
            bus.listen(done, DoneEvent, gateway.ends.hear),
        ):
            async with AsyncExitStack() as doors:
                stop_listening = await doors.enter_async_context(listening(gateway))
                await _heard(fleet, stop, bridged_s)
                await doors.enter_async_context(open_door(gateway))
                await doors.enter_async_context(telemetry(bus, config.telemetry_hz, gateway.state))
                await stop.wait()
                await _give_notice(gateway)
                await stop_listening()
                gateway.depart()
                last_call = asyncio.get_running_loop().call_later(config.drain_s, gateway.close)
            last_call.cancel()
    log.info("drained")


async def _heard(fleet: FleetListener, stop: asyncio.Event, within_s: float) -> None:
    """Wait until a router has told of the fleet, `stop` is set, or the time is over.

    Balancers ask `/readyz` before they send HTTP requests to a new gateway. NATS asks nothing: it hands edits to
    whoever listens. A gateway that knows no fleet would refuse them.
    """
    either = [asyncio.create_task(event.wait()) for event in (fleet.heard, stop)]
    try:
        await asyncio.wait(either, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for waiting in either:
            waiting.cancel()


async def _give_notice(gateway: Gateway) -> None:
    """Say that this gateway leaves, and take requests until balancers can have heard of it."""
    config = gateway.config
    others = gateway.fleet.has_another(config.instance)
    gateway.departure.announced.set()
    log.info("draining", rows=gateway.places.taken, others=others)
    if gateway.bus.client.is_connected:
        await publish_state(gateway.bus, gateway.state())
    if others:
        await asyncio.sleep(config.notice_s)  # balancers look in their own time and do not say when


@asynccontextmanager
async def _catching_up(gateway: Gateway) -> AsyncIterator[None]:
    """After every reconnect, make sure of the streams, and see which jobs have ended meanwhile."""
    reconnected = asyncio.Event()

    async def catch_up() -> None:
        while True:
            await reconnected.wait()
            reconnected.clear()
            for error in await asyncio.gather(
                gateway.restore(), gateway.ends.check(), return_exceptions=True
            ):
                if error is not None:  # the next feed that opens tries again, and so does the next reconnect
                    log.warning("catch_up_failed", exc_info=error)

    gateway.bus.on_reconnect.append(reconnected.set)
    task = asyncio.create_task(catch_up(), name="catch-up")
    try:
        yield
    finally:
        gateway.bus.on_reconnect.remove(reconnected.set)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
