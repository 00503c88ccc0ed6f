"""The ControlNet service: its endpoints, what it computes with, and what it tells of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial

import structlog
import torch

from giornata.blobs import BlobStore
from giornata.bus import telemetry
from giornata.bus.answering import Endpoint
from giornata.bus.bus import Bus
from giornata.control.devices import device_id
from giornata.machine import host_name, usable_cores
from giornata.wire import subjects
from giornata.wire.controlnets import (
    CloseControl,
    CloseControlReply,
    ControlState,
    DataPath,
    OpenControl,
    OpenControlReply,
    control_row,
)
from giornata.wire.devices import HostDevice
from giornata.wire.errors import InternalError
from giornata.wire.workers import ServiceName, ServiceState
from giornata_controlnet.computing import ControlNetThread
from giornata_controlnet.config import ControlNetConfig
from giornata_controlnet.listening import listening, path_of
from giornata_controlnet.nets import ResidentControlNets
from giornata_controlnet.opening import open_row
from giornata_controlnet.rows import OpenRowTable

log = structlog.get_logger(__name__)


class ControlNetService:
    """One instance, which computes `nets`; `gpus` are told."""

    _addresses: Mapping[DataPath, str]

    def __init__(
        self,
        config: ControlNetConfig,
        bus: Bus,
        blobs: BlobStore,
        nets: ResidentControlNets,
        gpus: Sequence[HostDevice] = (),
    ) -> None:
        self._config, self._bus, self._blobs, self._nets = config, bus, blobs, nets
        self._gpus = tuple(gpus)
        self._rows = OpenRowTable(config.control_rows, config.control_idle_s)
        self._draining = False
        self._crash: Exception | None = None
        self._computing: ControlNetThread

    async def run(self, stop: asyncio.Event) -> None:
        """Open rows and compute their steps until `stop`; then finish the rows that are open.

        Raises:
            ExceptionGroup: of an InternalError, when the device is lost.
            Failed: where steps cannot be listened for.
        """
        config, instance = self._config, self._config.instance
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            self._computing = stack.enter_context(self._thread(loop, stop))

            def left(token: str) -> None:
                loop.call_soon_threadsafe(self._rows.leave, token)

            links = listening(config, self._rows, self._computing.ask, left)
            self._addresses = stack.enter_context(links)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            stack.callback(tasks.create_task(self._rows.expire(), name="expire").cancel)
            serving = self._bus.serve(
                ServiceName.CONTROLNET,
                Endpoint(subjects.controlnet(instance, "open"), OpenControl, self._open),
                Endpoint(subjects.controlnet(instance, "close"), CloseControl, self._close),
                instance=instance,
            )
            await stack.enter_async_context(serving)
            await stack.enter_async_context(telemetry.telemetry(self._bus, config.telemetry_hz, self._state))
            log.info("ready", controlnets=[card.name for card in self._nets.cards], **self._told())
            await stop.wait()
            await self._drain()

    def _thread(self, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> ControlNetThread:
        def crashed(error: Exception) -> None:
            self._crash = error
            stop.set()

        return ControlNetThread(
            self._rows.find,
            self._nets.device,
            self._nets.dtype,
            tokens=self._config.control_tokens,
            on_crash=lambda error: loop.call_soon_threadsafe(crashed, error),
        )

    async def _open(self, request: OpenControl) -> OpenControlReply:
        """Endpoint ``giornata.controlnet.<instance>.open``."""
        path = path_of(request, self._addresses)
        key = control_row(request.job.job_id, request.attempt, request.index)
        make = partial(open_row, request, self._nets, self._blobs)
        row = await self._rows.open(key, request.denoiser, make)
        return OpenControlReply(
            path=path,
            address=self._addresses[path],
            token=self._rows.token(request.denoiser),
            behind=row.behind,
        )

    async def _close(self, request: CloseControl) -> CloseControlReply:
        """Endpoint ``giornata.controlnet.<instance>.close``."""
        return CloseControlReply(
            was_open=self._rows.close(control_row(request.job_id, request.attempt, request.index))
        )

    async def _drain(self) -> None:
        if self._crash is not None:
            raise InternalError("The ControlNets have lost their device.") from self._crash
        self._draining = True
        log.info("draining", rows=len(self._rows))
        if self._bus.client.is_connected:
            await telemetry.publish(self._bus, self._state())
        try:
            async with asyncio.timeout(self._config.drain_s):
                await self._rows.drained()
        except TimeoutError:
            log.warning("rows_left", rows=len(self._rows))
        log.info("drained")

    def _told(self) -> dict[str, str]:
        return {path.value: address for path, address in self._addresses.items()}

    def _state(self) -> ServiceState:
        nets, computed = self._nets, self._computing.counted()
        state = ControlState(
            capacity_rows=self._config.control_rows,
            machine=host_name(),
            device=device_id(nets.device),
            threads=torch.get_num_threads(),
            cores=usable_cores(),
            rows=len(self._rows),
            resident=nets.resident,
            resident_bytes=nets.resident_bytes,
            hits=nets.hits,
            misses=nets.misses,
            evicted=nets.evicted,
            steps_total=computed.steps,
            late_total=computed.late,
            work_ms=computed.work_ms,
            pending_ms=computed.pending_ms,
        )
        return telemetry.state_of(
            ServiceName.CONTROLNET,
            self._config,
            ready=not self._draining,
            draining=self._draining,
            controlnets=nets.cards,
            control=state,
            gpus=self._gpus,
        )
