"""The ControlNet service: its endpoints, where it listens for steps, and what it reports."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import structlog
import torch

from giornata.blobs import BlobStore
from giornata.bus.bus import Bus, Endpoint, publish_state, state_of, telemetry
from giornata.control.link.server import ControlStepRequest, Listener
from giornata.control.networks import device_id
from giornata.runtime import host_name, usable_cores
from giornata.scratch import scratch_folder
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
from giornata.wire.errors import ControlNetUnavailable, Failed, InternalError
from giornata.wire.workers import HostDevice, ServiceName, ServiceState
from giornata_controlnet.compute_thread import ControlNetThread
from giornata_controlnet.config import ControlNetConfig
from giornata_controlnet.rows import OpenRowTable, ResidentControlNets, open_row

SUFFIX: Final = ".sock"

log = structlog.get_logger(__name__)


@contextmanager
def listen(
    config: ControlNetConfig,
    rows: OpenRowTable,
    asked: Callable[[ControlStepRequest], None],
    left: Callable[[str], object],
) -> Iterator[Mapping[DataPath, str]]:
    """Listen within the context; gives the addresses as denoisers are told them.

    Raises:
        Failed: at an address nothing can be listened to.
    """
    with ExitStack() as stack:
        folder = config.control_socket
        if folder is None:
            folder = stack.enter_context(scratch_folder())
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _sweep(folder)
            unix = folder.absolute() / f"{secrets.token_hex(6)}{SUFFIX}"
            listener = Listener(
                rows.admits, asked, unix=unix, tcp=config.tcp, device=config.torch_device(), left=left
            )
            stack.enter_context(listener)
        except OSError as error:
            raise Failed(
                f"Steps cannot be listened for: {error}",
                received=f"{folder}, {config.control_address or 'no TCP'}",
            ) from error
        yield {
            path: config.advertised(address) if path is DataPath.TCP else address
            for path, address in listener.addresses.items()
        }


def path_of(request: OpenControl, addresses: Mapping[DataPath, str]) -> DataPath:
    """The best of the paths that a denoiser offers and this instance has; memory is shared within a host alone.

    Raises:
        ControlNetUnavailable: there is none.
    """
    here = request.host == host_name()
    able = [path for path in addresses if here or path is DataPath.TCP]
    for path in request.paths:
        if path in able:
            return path
    raise ControlNetUnavailable(
        "The denoiser and this ControlNet instance have no data path in common.",
        received=", ".join(request.paths),
        accepted=", ".join(able) or "denoisers of this host",
    )


def _sweep(folder: Path) -> None:
    """Remove sockets of processes that were killed."""
    for path in folder.glob(f"*{SUFFIX}"):
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except OSError:
                path.unlink(missing_ok=True)


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
            self._computing = stack.enter_context(
                ControlNetThread(
                    self._rows.find,
                    self._nets.device,
                    self._nets.dtype,
                    tokens=config.control_tokens,
                    on_crash=lambda error: loop.call_soon_threadsafe(self._crashed, error, stop),
                )
            )
            links = listen(
                config,
                self._rows,
                self._computing.ask,
                lambda token: loop.call_soon_threadsafe(self._rows.leave, token),
            )
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
            await stack.enter_async_context(telemetry(self._bus, config.telemetry_hz, self._state))
            paths = {path.value: address for path, address in self._addresses.items()}
            log.info("ready", controlnets=[card.name for card in self._nets.cards], **paths)
            await stop.wait()
            await self._drain()

    def _crashed(self, error: Exception, stop: asyncio.Event) -> None:
        self._crash = error
        stop.set()

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
            await publish_state(self._bus, self._state())
        try:
            async with asyncio.timeout(self._config.drain_s):
                await self._rows.drained()
        except TimeoutError:
            log.warning("rows_left", rows=len(self._rows))
        log.info("drained")

    def _state(self) -> ServiceState:
        nets = self._nets
        state = ControlState(
            capacity_rows=self._config.control_rows,
            machine=host_name(),
            device=device_id(nets.device),
            threads=torch.get_num_threads(),
            cores=usable_cores(),
            rows=len(self._rows),
            resident=tuple(reversed(tuple(nets.tier))),
            resident_bytes=nets.tier.size_bytes,
            hits=nets.hits,
            misses=nets.misses,
            evicted=nets.tier.evicted,
            **self._computing.counted(),
        )
        return state_of(
            ServiceName.CONTROLNET,
            self._config,
            ready=not self._draining,
            draining=self._draining,
            controlnets=nets.cards,
            control=state,
            gpus=self._gpus,
        )
