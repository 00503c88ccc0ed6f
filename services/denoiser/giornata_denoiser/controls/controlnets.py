"""All ControlNets that a denoiser has: its own, and those of the service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from giornata.bus.bus import Bus
from giornata.control.layout import Behind, count_sequences, sum_residuals
from giornata.control.link.client import ControlLink
from giornata.control.networks import CPU, device_id
from giornata.planning.cost_model import CostModel
from giornata.planning.operations import control_work, work_of
from giornata.runtime import host_name, memory_bytes, usable_cores
from giornata.scheduling.batch import RowKey
from giornata.wire.adapters import ControlKind
from giornata.wire.controlnets import ControlBase, ControlState, DataPath
from giornata.wire.errors import ControlNetNotFound
from giornata.wire.messages import RunRequest
from giornata.wire.workers import ServiceState
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.choices import ControlNetExecutor
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.controls.residuals import (
    ControlNetTarget,
    LocalControls,
    OpenControls,
    PoolControls,
    RemoteControls,
    control_target,
    with_control_costs,
)
from giornata_denoiser.controls.sessions import (
    ControlClientInfo,
    ControlNetInstances,
    ControlNetSessionManager,
    DataPathPool,
    able_instances,
    best_instance,
    control_of,
)
from giornata_denoiser.engine.batch_tensors import ControlLost, ControlPart, OfSequences, check_computed
from giornata_denoiser.engine.slabs import WaitTimer
from giornata_denoiser.engine.step_budget import predicted_ms
from giornata_denoiser.rows.row import Row

SLAB_SHARE: Final = 16
"""A data path takes at most one part in so many of the machine's memory by default."""
SLAB_MB: Final = 1024
"""And at most so much."""
HOST_BYTES_MS: Final = 5e6
"""Bytes a millisecond between processes of one host; measured, see `docs/results/controlnets.md`."""
NETWORK_BYTES_MS: Final = 1e6
"""Between hosts, assumed."""
WORK: Final = 1e9
"""Multiplications of which an instance tells the time."""


class ResidualTiming(NamedTuple):
    """The moments at which a sum of residuals is made and read."""

    made: float
    """Share of the ControlNets' work up to it."""
    read: float
    """Share of the network's work before it."""


@dataclass(frozen=True)
class RowWork:
    """One step of a row, as far as it matters who computes its ControlNets."""

    network_ms: float
    """Predicted time of the network without them."""
    local_ms: float
    """Predicted time of them in this process; infinite where it does not have them."""
    work: float
    """Multiplications of them."""
    moved_bytes: int
    """Size of the samples that an instance returns."""
    due: tuple[ResidualTiming, ...]
    """:func:`due` of its ControlNets."""


class ControlledRows(NamedTuple):
    """Rows whose ControlNets are computed somewhere."""

    rows: tuple[Row, ...]
    failed: asyncio.Future[None]
    """Has the error of a row whose ControlNets cannot be had."""


def residual_timing(kind: ControlKind, nets: Sequence[Behind]) -> tuple[ResidualTiming, ...]:
    """Return when the sums of what several ControlNets add are made and read; all of their blocks count as equal.

    A transformer reads a sum behind the first block that it is added to; a UNet reads all of them before its decoder,
    which is about half of it.
    """
    if kind is ControlKind.UNET:
        return (ResidualTiming(1.0, 0.5),)
    sums = sum_residuals(nets)
    made = [0] * len(nets)
    blocks = sum(1 + max((sample for sample in net if sample is not None), default=-1) for net in nets)
    found = []
    for parts, block in zip(sums.parts, sums.first, strict=True):
        for net, sample in parts:
            made[net] = max(made[net], sample + 1)
        found.append(ResidualTiming(sum(made) / blocks, (block + 1) / len(sums.behind)))
    return tuple(found)


def exposed_ms(row: RowWork, state: ServiceState, here: ControlState) -> float:
    """Predicted time for which a step waits for what an instance computes.

    The network computes meanwhile, unless both share a device, or too few cores: then the instance is not faster than
    this process, `here`, either, whatever both have measured beside others. An instance that has computed nothing yet
    is taken to be as fast as this process.
    """
    told = control_of(state)
    same = told.machine == here.machine
    computed = row.local_ms if told.work_ms is None else row.work / WORK * told.work_ms
    moved = row.moved_bytes / (HOST_BYTES_MS if same else NETWORK_BYTES_MS)
    roomy = here.device == CPU and here.threads + told.threads <= len({*here.cores, *told.cores})
    if same and told.device == here.device and not roomy:
        return told.pending_ms + max(computed, row.local_ms) + moved
    waits = (told.pending_ms + (computed + moved) * made - row.network_ms * read for made, read in row.due)
    return max(0.0, *waits)


def choose_executor(
    row: RowWork,
    states: Iterable[ServiceState],
    digests: Collection[str],
    here: ControlState,
    executor: ControlNetExecutor,
) -> ServiceState | None:
    """The instance that is to compute a row's ControlNets; None: this process, if it can.

    `states` are :func:`able_instances`.
    """
    found = best_instance(states, digests, here.machine)
    has = row.local_ms < float("inf")
    if found is None or (executor is ControlNetExecutor.LOCAL and has):
        return None
    if executor is ControlNetExecutor.SERVICE or not has:
        return found
    return found if exposed_ms(row, found, here) < row.local_ms else None


class ControlDispatcher(ControlPart):
    """Asks an instance for a row that is open there, and computes the others here. Either executor may be missing."""

    def __init__(self, local: LocalControls | None, remote: RemoteControls | None) -> None:
        self._local, self._remote = local, remote
        self._computes = False
        """Whether anything may be kept of rows."""

    def able(self, row: Row) -> Row | None:
        """See :meth:`giornata_denoiser.engine.batch_tensors.ControlPart.able`: rows wait until they are open.

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
        """See :meth:`giornata_denoiser.engine.batch_tensors.ControlPart.residuals`.

        Instances are asked first, and compute while this process does.
        """
        self._computes, found = True, dict[RowKey, OfSequences]()
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
        check_computed(rows, found)
        return tuple(found.get(row.key, ()) for row in rows)

    def retain(self, keys: Collection[RowKey]) -> None:
        """See :meth:`giornata_denoiser.engine.batch_tensors.ControlPart.retain`."""
        if not self._computes:
            return
        if self._local is not None:
            self._local.retain(keys)
        if self._remote is not None:
            self._remote.retain(keys)
        self._computes = bool(keys)

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
        return self._remote is not None and self._remote.sessions.has(row.key)


def dispatcher_of(
    config: DenoiserConfig,
    checkpoint: Checkpoint,
    network: ControlNetTarget,
    sessions: OpenControls[ControlLink],
    lost: Callable[[RowKey, Exception], None],
) -> ControlDispatcher:
    """Return what computes the checkpoint's ControlNets, and asks in `sessions` for others; `lost` is of its rows."""
    family, nets, held = checkpoint.family, checkpoint.controlnets, config.control_held_steps
    remote = RemoteControls(
        network,
        family.dtype,
        family.device,
        lost,
        held_steps=held,
        late_s=config.control_late_s,
        sessions=sessions,
    )
    return ControlDispatcher(LocalControls(nets, network, held) if nets else None, remote)


class DenoiserControlNets:
    """The ControlNets of one denoiser whose network can have some; `pooled` where ranks compute the rows."""

    def __init__(
        self,
        config: DenoiserConfig,
        checkpoint: Checkpoint,
        network: ControlNetTarget,
        costs: CostModel,
        *,
        instances: ControlNetInstances,
        sessions: ControlNetSessionManager,
        pooled: bool = False,
    ) -> None:
        self._config, self._checkpoint, self._network, self._costs = config, checkpoint, network, costs
        self._instances, self._sessions = instances, sessions
        self.pool = PoolControls(sessions.lost) if pooled else None
        """Where the rows of a pool are open."""
        self.controls = ControlPart()
        if self.pool is not None:
            sessions.opened = self.pool
        else:
            sessions.opened = opened = OpenControls[ControlLink]()
            self.controls = dispatcher_of(config, checkpoint, network, opened, sessions.lost)

    @property
    def base(self) -> ControlBase:
        """Return what ControlNets add to here."""
        return self._network.base

    def placed(self, rows: Sequence[Row]) -> tuple[Row, ...]:
        """`rows` as they are computed: what instances compute costs nothing here."""
        return tuple(with_control_costs(row, {}) if self._asks(row) else row for row in rows)

    @asynccontextmanager
    async def opened(self, request: RunRequest, rows: Sequence[Row]) -> AsyncIterator[ControlledRows]:
        """Keep rows that instances compute open there."""
        placed = self.placed(rows)
        local = all(use.digest in self._checkpoint.control_cards for use in request.job.controls)
        asked = [
            row
            for row in placed
            if row.adapters.controls and all(use.work is None for use in row.adapters.controls)
        ]
        async with self._sessions.held(request, asked, fall_back=local) as failed:
            yield ControlledRows(placed, failed)

    def _asks(self, row: Row) -> bool:
        """Return whether an instance computes the ControlNets of a row."""
        nets, controls = self._checkpoint.control_cards, row.adapters.controls
        if any(use.digest not in nets for use in controls):
            return True
        if self.pool is not None or not controls:  # ranks compute what they have
            return False
        digests = {use.digest for use in controls}
        states = able_instances(self._instances.states, digests)
        return (
            choose_executor(self._work(row), states, digests, self._here(), self._config.control_executor)
            is not None
        )

    def _here(self) -> ControlState:
        """This process, as an instance tells of itself."""
        device = device_id(self._checkpoint.family.device)
        threads, cores = torch.get_num_threads(), usable_cores()
        return ControlState(capacity_rows=0, machine=host_name(), device=device, threads=threads, cores=cores)

    def _work(self, row: Row) -> RowWork:
        """The work of a row whose ControlNets are all here."""
        costs, operations = self._costs.costs, self._checkpoint.family.operations
        network_ms = predicted_ms([with_control_costs(row, {})], costs, operations)
        base, count = self._network.base, count_sequences(self._network.base.kind, len(row.inputs.prompts))
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
                    sequences=len(row.inputs.prompts),
                )
                for net in nets
                for prompt in row.inputs.prompts
            ),
            moved_bytes=count * row.computed_tokens * channels * self._checkpoint.family.dtype.itemsize,
            due=residual_timing(base.kind, behind),
        )


@asynccontextmanager
async def open_rows(
    room: DenoiserControlNets | None, request: RunRequest, rows: Sequence[Row]
) -> AsyncIterator[ControlledRows]:
    """Have the ControlNets of `rows` computed within the context.

    Raises:
        ControlNetNotFound: they have some, and there is no room.
    """
    lacking = [use.model for use in request.job.controls]
    if lacking and room is not None:
        async with room.opened(request, rows) as opened:
            yield opened
        return
    if lacking:
        raise ControlNetNotFound(field="controlnets", received=lacking[0], accepted="none for this model")
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    try:
        yield ControlledRows(tuple(rows), never)
    finally:
        never.cancel()


@asynccontextmanager
async def control_room(
    config: DenoiserConfig,
    bus: Bus,
    checkpoint: Checkpoint,
    costs: CostModel,
    resume: Callable[[str, int], None],
    *,
    pooled: bool = False,
) -> AsyncIterator[DenoiserControlNets | None]:
    """The room of a denoiser; None where its network can have no ControlNets. `resume` is the engine's.

    That of a `pooled` one opens rows for its ranks, which ask by themselves.
    """
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
    instances, links = ControlNetInstances(), DataPathPool(slab_mb << 20, None if pooled else device)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(links.close)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())

        def gone(instance: str) -> None:
            tasks.create_task(links.leave(instance), name="leave")

        instances.on_gone = gone
        sessions = ControlNetSessionManager(
            bus, instances, links, asking, open_s=config.control_open_s, resume=resume, tasks=tasks
        )
        room = DenoiserControlNets(
            config, checkpoint, network, costs, instances=instances, sessions=sessions, pooled=pooled
        )
        await stack.enter_async_context(instances.heard(bus))
        yield room


def controls_of(room: DenoiserControlNets | None) -> ControlPart:
    """Return what an engine asks."""
    return ControlPart() if room is None else room.controls
