"""All that a denoiser has of ControlNets: those of its own, and those that instances of the service compute for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final, NamedTuple

import torch

from giornata.bus.bus import Bus
from giornata.control.devices import device_id
from giornata.control.expansion import sequences, summed
from giornata.machine import host_name, memory_bytes, usable_cores
from giornata.planning.controls import control_work, work_of
from giornata.planning.costing import CostModel
from giornata.wire.controlnets import ControlBase, DataPath
from giornata.wire.errors import ControlNetNotFound
from giornata.wire.messages import RunRequest
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.controls.choosing import DenoiserProcess, RowWork, able, chosen, due
from giornata_denoiser.controls.executing import ControlDispatcher
from giornata_denoiser.controls.instances import ControlNetInstances, DataPathPool
from giornata_denoiser.controls.local import LocalControls, costing
from giornata_denoiser.controls.networks import ControlNetTarget, controlled
from giornata_denoiser.controls.questions import ControlClientInfo
from giornata_denoiser.controls.remote import RemoteControlOptions, RemoteControls
from giornata_denoiser.controls.sessions import ControlNetSessionManager
from giornata_denoiser.engine.controls import ControlExecutor, NoControls
from giornata_denoiser.engine.weighing import predicted_ms
from giornata_denoiser.rows.row import Row

SLAB_SHARE: Final = 16
"""A data path takes at most one part in so many of the machine's memory by default."""
SLAB_MB: Final = 1024
"""And at most so much."""


class DenoiserControlNets:
    """The ControlNets of one denoiser whose network can have some."""

    def __init__(
        self,
        config: DenoiserConfig,
        checkpoint: Checkpoint,
        network: ControlNetTarget,
        costs: CostModel,
        *,
        instances: ControlNetInstances,
        sessions: ControlNetSessionManager,
    ) -> None:
        self._config, self._checkpoint, self._network, self._costs = config, checkpoint, network, costs
        self._instances, self._sessions = instances, sessions
        family, nets = checkpoint.family, checkpoint.controlnets
        held = config.control_held_steps
        local = LocalControls(nets, network, held) if nets else None
        manner = RemoteControlOptions(held, config.control_late_s)
        sessions.remote = RemoteControls(network, family.dtype, family.device, sessions.lost, manner)
        self.controls: ControlExecutor = ControlDispatcher(local, sessions.remote)

    @property
    def base(self) -> ControlBase:
        """What ControlNets add to here."""
        return self._network.base

    def placed(self, rows: Sequence[Row]) -> tuple[Row, ...]:
        """`rows` as they are computed: what instances compute costs nothing here."""
        return tuple(costing(row, {}) if self._asks(row) else row for row in rows)

    @asynccontextmanager
    async def held(self, request: RunRequest, rows: Sequence[Row]) -> AsyncIterator[asyncio.Future[None]]:
        """Keep rows that instances compute open there; the future has the error of one that cannot be."""
        asked = [row for row in rows if row.adapters.controls and not _costs_here(row)]
        local = all(use.digest in self._checkpoint.controlnets for use in request.job.controls)
        async with self._sessions.held(request, asked, fall_back=local) as failed:
            yield failed

    def _asks(self, row: Row) -> bool:
        """Whether an instance computes the ControlNets of a row."""
        nets, controls = self._checkpoint.controlnets, row.adapters.controls
        if not controls:
            return False
        if any(use.digest not in nets for use in controls):
            return True
        digests = {use.digest for use in controls}
        states = able(self._instances.states, digests)
        return (
            chosen(self._work(row), states, digests, self._here(), self._config.control_executor) is not None
        )

    def _here(self) -> DenoiserProcess:
        device = device_id(self._checkpoint.family.device)
        return DenoiserProcess(host_name(), device, torch.get_num_threads(), usable_cores())

    def _work(self, row: Row) -> RowWork:
        """The work of a row whose ControlNets are all here."""
        costs, operations = self._costs.costs, self._checkpoint.family.operations
        network_ms = predicted_ms([costing(row, {})], costs, operations)
        base, count = self._network.base, sequences(self._network.base.kind, len(row.prompts))
        nets = [self._checkpoint.controlnets[use.digest] for use in row.adapters.controls]
        behind = [net.behind(base) for net in nets]
        channels = sum(base.channels[block] for block in summed(behind).first)
        return RowWork(
            network_ms=network_ms,
            local_ms=predicted_ms([row], costs, operations) - network_ms,
            work=sum(
                control_work(
                    work_of(net.card),
                    text=prompt.joint_tokens,
                    image=row.image_tokens,
                    sequences=len(row.prompts),
                )
                for net in nets
                for prompt in row.prompts
            ),
            moved_bytes=count * row.computed_tokens * channels * self._checkpoint.family.dtype.itemsize,
            due=due(base.kind, behind),
        )


class ControlledRows(NamedTuple):
    """Rows whose ControlNets are computed somewhere."""

    rows: tuple[Row, ...]
    failed: asyncio.Future[None]
    """Has the error of a row whose ControlNets cannot be had."""


@asynccontextmanager
async def open_rows(
    room: DenoiserControlNets | None, request: RunRequest, rows: Sequence[Row]
) -> AsyncIterator[ControlledRows]:
    """Have the ControlNets of `rows` computed within the context.

    Raises:
        ControlNetNotFound: they have some, and the network can have none.
    """
    if room is not None:
        placed = room.placed(rows)
        async with room.held(request, placed) as failed:
            yield ControlledRows(placed, failed)
        return
    if request.job.controls:
        raise ControlNetNotFound(
            field="controlnets", received=request.job.controls[0].model, accepted="none for this model"
        )
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    try:
        yield ControlledRows(tuple(rows), never)
    finally:
        never.cancel()


def _costs_here(row: Row) -> bool:
    return any(use.work is not None for use in row.adapters.controls)


@asynccontextmanager
async def control_room(
    config: DenoiserConfig,
    bus: Bus,
    checkpoint: Checkpoint,
    costs: CostModel,
    resume: Callable[[str, int], None],
) -> AsyncIterator[DenoiserControlNets | None]:
    """The room of a denoiser; None where its network can have no ControlNets. `resume` is the engine's."""
    network = controlled(checkpoint.family.network, checkpoint.card.pixel_multiple)
    if network is None:
        yield None
        return
    family = checkpoint.family
    device = family.device
    paths: tuple[DataPath, ...] = (DataPath.UNIX, DataPath.TCP)
    if device.type == "cuda":
        paths = (DataPath.CUDA, *paths)
    asking = ControlClientInfo(network.base, config.instance, host_name(), paths, family.dtype)
    slab_mb = config.control_slab_mb or min(SLAB_MB, memory_bytes() // SLAB_SHARE >> 20)
    instances, links = ControlNetInstances(), DataPathPool(slab_mb << 20, device)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(links.close)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())

        def gone(instance: str) -> None:
            tasks.create_task(links.leave(instance), name="leave")

        instances.on_gone = gone
        sessions = ControlNetSessionManager(
            bus, instances, links, asking, open_s=config.control_open_s, resume=resume, tasks=tasks
        )
        room = DenoiserControlNets(config, checkpoint, network, costs, instances=instances, sessions=sessions)
        await stack.enter_async_context(instances.heard(bus))
        yield room


def controls_of(room: DenoiserControlNets | None) -> ControlExecutor:
    """What an engine asks."""
    return NoControls() if room is None else room.controls
