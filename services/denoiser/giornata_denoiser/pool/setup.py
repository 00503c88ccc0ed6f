"""Starting a pool as a denoiser is configured."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import structlog
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports no type

from giornata.gpus import VISIBLE, visible_alone
from giornata.planning.cost_model import CostModel, Profile
from giornata.scheduling.degrees.pool import Devices, device_subsets
from giornata.scheduling.degrees.recording import DecisionRecord, RecordedRule, as_json
from giornata.scheduling.degrees.rule import ReplanningRule
from giornata.wire.values import BlockMode
from giornata_denoiser.checkpoint import Checkpoint, open_outline
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.devices import check_present
from giornata_denoiser.engine.adapters import LowRanks
from giornata_denoiser.engine.protocol import StepReport
from giornata_denoiser.parallel import is_possible
from giornata_denoiser.pool.leader import DevicePool
from giornata_denoiser.pool.messages import RankSetup
from giornata_denoiser.pool.ranks import LocalRankProcess, RankProcess, RankSupervisor, RankTimeouts
from giornata_denoiser.pool.shared_memory import Arena
from giornata_denoiser.pool.state import PoolTimes
from giornata_denoiser.templates.identity import form_of

log = structlog.get_logger(__name__)

LOOPBACK: Final = "127.0.0.1"
GROUP_S: Final = 30.0
"""How long members of a group wait for each other; a stalled one is ended long before."""
LEFT_OUT: Final = ("nats_url", "nats_password_file", "blobs_url", "devices")
"""Fields of the service's configuration for which a rank has no use."""


def start_ranks(config: DenoiserConfig, patience: RankTimeouts | None = None) -> RankSupervisor:
    """Start a rank for each device. They load the model; :meth:`RankSupervisor.loaded` waits for that.

    The calling thread has to outlive them: the kernel ends them with it.

    Raises:
        Failed: this machine lacks a device.
    """
    devices = config.device_names
    check_present(devices)
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)

    def start(me: int) -> RankProcess:
        shown = None if devices[me] == "cpu" else visible_alone(devices[me], os.environ.get(VISIBLE))
        return LocalRankProcess(opening_of(config, me, store.port), shown)

    return RankSupervisor(devices, start, patience, keeps=store)


def opening_of(config: DenoiserConfig, me: int, port: int) -> RankSetup:
    """What the rank of a place, which sees its GPU alone, is told first; `port` is that of the leader's store."""
    devices = config.device_names
    fields = DenoiserConfig.model_fields
    without = {name: fields[name].get_default(call_default_factory=True) for name in LEFT_OUT}
    on_cpu = devices[me] == "cpu"
    own = config.model_copy(update={**without, "device": "cpu" if on_cpu else "cuda:0"})
    threads = None
    if on_cpu and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, (os.cpu_count() or 1) // len(devices))
    groups = sum(me in group for group in groups_of(len(devices)))
    return RankSetup(own, me, (LOOPBACK, port), groups, GROUP_S, config.correction_bits, threads)


def loaded(config: DenoiserConfig, ranks: RankSupervisor) -> tuple[Checkpoint, Profile]:
    """The checkpoint's outline, and what steps cost on the first device, once all ranks have loaded the model.

    Of several devices, only in ways in which they can compute the checkpoint.

    Raises:
        Failed: the model cannot be loaded, or computes nothing finite, or the profile is of something else.
    """
    try:
        described = open_outline(config.model_copy(update={"device": config.device_names[0]}))
    except BaseException:
        ranks.close(within_s=0.0)
        raise
    ready = ranks.loaded()
    degrees = tuple(fit for fit in ready.profile.degrees if is_possible(described.family, fit.way))
    outline = replace(described, rank_controls=ready.controls)
    return outline, ready.profile.model_copy(update={"degrees": degrees})


def pool_of(  # noqa: PLR0917 - the parts of an engine
    config: DenoiserConfig,
    ranks: RankSupervisor,
    arena: Arena,
    checkpoint: Checkpoint,
    costs: CostModel,
    record: Callable[[DecisionRecord], None] | None,
    on_report: Callable[[StepReport], object],
    on_crash: Callable[[Exception], object],
    low_ranks: LowRanks,
) -> DevicePool:
    """The engine of a denoiser with `ranks`; every decision is told to `record`, if there is one."""
    reused = BlockMode(form_of(config, checkpoint.family))
    times = PoolTimes(
        costs, checkpoint.family.operations, reused, config.capacity_rows, config.capacity_tokens
    )
    devices = len(config.device_names)
    known = {way.degree for way, _ in costs.ways}
    groups = groups_of(devices)
    if unknown := sorted({len(group) for group in groups} - known):
        log.warning("degrees_unused", degrees=unknown, remedy="measure them: giornata profile --devices")
    return DevicePool(
        ranks,
        arena,
        rule=ReplanningRule(devices, together=times.together)
        if record is None
        else RecordedRule(record, devices, together=times.together),
        groups=[group for group in groups if len(group) in known],
        times=times.of,
        together=times.together,
        halves=times.halves,
        observe=times.observe,
        on_report=on_report,
        on_crash=on_crash,
        low_ranks=low_ranks,
    )


@contextmanager
def decisions(folder: Path | None) -> Iterator[Callable[[DecisionRecord], None] | None]:
    """Open `decisions.jsonl` in `folder`, a line for each decision; None without one. One thread calls it."""
    if folder is None:
        yield None
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "decisions.jsonl").open("ab") as file:

        def record(recording: DecisionRecord) -> None:
            with suppress(OSError):  # a full disk costs recordings, not the pool
                file.write(as_json(recording) + b"\n")

        yield record


@asynccontextmanager
async def in_thread(pool: DevicePool) -> AsyncIterator[DevicePool]:
    """`pool`, entered and left; leaving waits for the running steps and the ranks' ends, and not on the event loop."""
    pool.__enter__()
    try:
        yield pool
    finally:
        await asyncio.shield(asyncio.create_task(asyncio.to_thread(pool.__exit__), name="pool ends"))


def groups_of(devices: int) -> tuple[Devices, ...]:
    """The groups that steps of a pool may have, small ones first."""
    return tuple(sorted((group for group in device_subsets(devices) if len(group) > 1), key=len))
