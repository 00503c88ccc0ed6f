"""All ControlNets that a denoiser has: its own, and those of the service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final, NamedTuple

import torch

from giornata.bus.bus import Bus
from giornata.control.expansion import count_sequences, sum_residuals
from giornata.control.networks import device_id
from giornata.planning.cost_model import CostModel
from giornata.planning.operations import control_work, work_of
from giornata.runtime import host_name, memory_bytes, usable_cores
from giornata.scheduling.batch import RowKey
from giornata.wire.controlnets import ControlBase, DataPath
from giornata.wire.errors import ControlNetNotFound
from giornata.wire.messages import RunRequest
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.controls.executor_choice import (
    DenoiserProcess,
    RowWork,
    able_instances,
    choose_executor,
    residual_timing,
)
from giornata_denoiser.controls.local import (
    ControlNetTarget,
    LocalControls,
    control_target,
    with_control_costs,
)
from giornata_denoiser.controls.remote import RemoteControlOptions, RemoteControls
from giornata_denoiser.controls.sessions import (
    ControlClientInfo,
    ControlNetInstances,
    ControlNetSessionManager,
    DataPathPool,
)
from giornata_denoiser.engine.batch_tensors import (
    ControlExecutor,
    ControlLost,
    ControlNotLoaded,
    NoControls,
    OfSequences,
)
from giornata_denoiser.engine.slabs import WaitTimer
from giornata_denoiser.engine.step_budget import predicted_ms
from giornata_denoiser.rows.row import Row

# ControlNets of a step's rows, each computed where its row is open: in this process, or at an instance.


class ControlDispatcher:
    """Satisfies :class:`giornata_denoiser.engine.batch_tensors.ControlExecutor`.

    A row that is open at an instance is asked there.

    Either executor may be missing.
    """

    def __init__(self, local: LocalControls | None, remote: RemoteControls | None) -> None:
        self._local, self._remote = local, remote

    def able(self, row: Row) -> Row | None:
        """See :meth:`giornata_denoiser.engine.batch_tensors.ControlExecutor.able`: rows wait until they are open.

        One that is computed here meanwhile, or because no instance is left, costs this process what it computes.
        """
        if self._remote is None or not row.adapters.controls:
            return row
        if self._asks(row):
            return with_control_costs(row, {})
        if self._local is not None and self._local.has(row):
            return with_control_costs(row, self._local.works)
        return None if any(row.adapters.controlling(row.step)) else row

    def residuals(
        self, rows: Sequence[Row], whole: Sequence[bool], waits: WaitTimer
    ) -> tuple[OfSequences, ...]:
        """See :meth:`giornata_denoiser.engine.batch_tensors.ControlExecutor.residuals`.

        Instances are asked first, and compute while this process does.
        """
        found: dict[RowKey, OfSequences] = {}
        if self._remote is not None:
            asking = [(row, every) for row, every in zip(rows, whole, strict=True) if self._asks(row)]
            elsewhere = [row for row, _ in asking]
            self._check(rows, {row.key for row in elsewhere})
            asked = self._remote.ask(elsewhere, [every for _, every in asking], waits)
            found |= {row.key: added for row, added in zip(elsewhere, asked, strict=True)}
        here = [n for n, row in enumerate(rows) if row.key not in found and row.adapters.controls]
        if self._local is not None and here:
            made = self._local.compute([rows[n] for n in here], [whole[n] for n in here])
            found |= {rows[n].key: added for n, added in zip(here, made, strict=True)}
        for row in rows:
            if row.key not in found and any(row.adapters.controlling(row.step)):
                raise ControlNotLoaded(f"row {row.key} has ControlNets, and this worker has none")
        return tuple(found.get(row.key, ()) for row in rows)

    def retain(self, keys: Collection[RowKey]) -> None:
        """See :meth:`giornata_denoiser.engine.batch_tensors.ControlExecutor.retain`."""
        if self._local is not None:
            self._local.retain(keys)
        if self._remote is not None:
            self._remote.retain(keys)

    def _check(self, rows: Sequence[Row], asked: Collection[RowKey]) -> None:
        """Raise ControlLost where one that can only be asked for has been closed since it was ready."""
        closed = {
            row.key
            for row in rows
            if row.key not in asked and any(row.adapters.controlling(row.step)) and not self._here(row)
        }
        if closed:
            raise ControlLost(closed)

    def _here(self, row: Row) -> bool:
        return self._local is not None and self._local.has(row)

    def _asks(self, row: Row) -> bool:
        return self._remote is not None and self._remote.has(row.key)


# All that a denoiser has of ControlNets: those of its own, and those that instances of the service compute
# for it.


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
        """Return what ControlNets add to here."""
        return self._network.base

    def placed(self, rows: Sequence[Row]) -> tuple[Row, ...]:
        """`rows` as they are computed: what instances compute costs nothing here."""
        return tuple(with_control_costs(row, {}) if self._asks(row) else row for row in rows)

    @asynccontextmanager
    async def held(self, request: RunRequest, rows: Sequence[Row]) -> AsyncIterator[asyncio.Future[None]]:
        """Keep rows that instances compute open there; the future has the error of one that cannot be."""
        asked = [row for row in rows if row.adapters.controls and not _costs_here(row)]
        local = all(use.digest in self._checkpoint.controlnets for use in request.job.controls)
        async with self._sessions.held(request, asked, fall_back=local) as failed:
            yield failed

    def _asks(self, row: Row) -> bool:
        """Return whether an instance computes the ControlNets of a row."""
        nets, controls = self._checkpoint.controlnets, row.adapters.controls
        if not controls:
            return False
        if any(use.digest not in nets for use in controls):
            return True
        digests = {use.digest for use in controls}
        states = able_instances(self._instances.states, digests)
        return (
            choose_executor(self._work(row), states, digests, self._here(), self._config.control_executor)
            is not None
        )

    def _here(self) -> DenoiserProcess:
        device = device_id(self._checkpoint.family.device)
        return DenoiserProcess(host_name(), device, torch.get_num_threads(), usable_cores())

    def _work(self, row: Row) -> RowWork:
        """The work of a row whose ControlNets are all here."""
        costs, operations = self._costs.costs, self._checkpoint.family.operations
        network_ms = predicted_ms([with_control_costs(row, {})], costs, operations)
        base, count = self._network.base, count_sequences(self._network.base.kind, len(row.prompts))
        nets = [self._checkpoint.controlnets[use.digest] for use in row.adapters.controls]
        behind = [net.behind(base) for net in nets]
        channels = sum(base.channels[block] for block in sum_residuals(behind).first)
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
            due=residual_timing(base.kind, behind),
        )


class ControlledRows(NamedTuple):
    """Rows whose ControlNets are computed somewhere."""

    rows: tuple[Row, ...]
    failed: asyncio.Future[None]
    """Has the error of a row whose ControlNets cannot be had."""


@asynccontextmanager
async def open_rows(
    room: DenoiserControlNets | None, request: RunRequest, rows: Sequence[Row], here: Collection[str] = ()
) -> AsyncIterator[ControlledRows]:
    """Have the ControlNets of `rows` computed within the context; without a room those `here` alone, by digest.

    Raises:
        ControlNetNotFound: they have others, and there is no room.
    """
    if room is not None:
        placed = room.placed(rows)
        async with room.held(request, placed) as failed:
            yield ControlledRows(placed, failed)
        return
    if lacking := [use.model for use in request.job.controls if use.digest not in here]:
        raise ControlNetNotFound(
            field="controlnets",
            received=lacking[0],
            accepted="those of this denoiser's own" if here else "none for this model",
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
    network = control_target(checkpoint.family.network, checkpoint.card.pixel_multiple)
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
    """Return what an engine asks."""
    return NoControls() if room is None else room.controls
