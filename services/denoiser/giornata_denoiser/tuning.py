"""Parts of a running engine, from configuration and profile."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import structlog
import torch

from giornata.memory_plan import CONTEXT_BYTES, USABLE, plan_prepost
from giornata.packed.packing import UNTRACED
from giornata.planning.cost_model import CostModel, Profile
from giornata.planning.plans import plan_batch
from giornata.runtime import memory_bytes
from giornata.scheduling.batch import Capacity
from giornata.wire.workers import LoadSample, ServiceName, Tier
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.engine.adapters import ControlExecutor, LowRanks
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.loading import FinishedSlabLoad, Loader, device_for
from giornata_denoiser.engine.step_budget import StepBudget
from giornata_denoiser.engine.step_plan import ReuseOptions
from giornata_denoiser.templates.identity import levels_of, storage_budget
from giornata_denoiser.trace import Trace

SPARED: Final = 0.9
"""Share of a GPU's free memory that rows and templates may fill where no budget is configured."""
DEVICE_SHARE: Final = 4
AHEAD_SHARE: Final = 8
"""Templates on a GPU, and what is loaded ahead, may take one part in so many of its free memory by default."""
HOST_AHEAD_SHARE: Final = 16
"""On a CPU, what is loaded ahead: one part in so many of the machine's memory."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class MemoryBudget:
    """A division of the memory beside the model's weights, in bytes."""

    templates: int
    """In host memory."""
    device: int
    """Templates on a GPU; 0 on a CPU."""
    ahead: int
    """Slabs for later steps."""
    rows: float
    """Rows, with their slabs, and activations."""


def memory_of(config: DenoiserConfig, free_bytes: int | None) -> MemoryBudget:
    """Return what is configured, else shares of what there is.

    `free_bytes` are those of the GPU once the model is there; None on a CPU, where rows have no limit.
    """
    if free_bytes is None:
        device, ahead, left = 0, memory_bytes() // HOST_AHEAD_SHARE, math.inf
    else:
        device, ahead = free_bytes // DEVICE_SHARE, free_bytes // AHEAD_SHARE
        if config.template_device_mb is not None:
            device = config.template_device_mb << 20
        left = max(0.0, SPARED * free_bytes - device)
    return MemoryBudget(
        config.template_memory_mb << 20,
        device,
        ahead if config.template_ahead_mb is None else config.template_ahead_mb << 20,
        left if config.memory_mb is None else config.memory_mb << 20,
    )


@contextmanager
def engine_of(
    config: DenoiserConfig,
    checkpoint: Checkpoint,
    profile: Profile,
    model: CostModel,
    told: Callable[[LoadSample], object] = lambda _: None,
    *,
    low_ranks: LowRanks | None = None,
    controls: ControlExecutor | None = None,
) -> Iterator[Engine]:
    """An engine with its loader, which ends with the context; then the trace is written, if there is one.

    `told` hears of every load that the cost model hears of, in the loader's thread. `low_ranks`
    holds the LoRAs of rows, `controls` their ControlNets.
    """
    device = checkpoint.family.device
    memory = memory_on(config, checkpoint)
    _tell(config, checkpoint, memory)
    trace = Trace(device) if config.trace_folder is not None else None

    def loaded(load: FinishedSlabLoad) -> None:
        # On a GPU the loader's thread only gives orders; the profile tells how long they take.
        if device.type == "cpu" and load.size_bytes:
            model.observe_load(load.size_bytes, load.ms)
            told(LoadSample(tier=Tier.MEMORY, size_bytes=load.size_bytes, load_ms=load.ms))

    try:
        with Loader(on_loaded=loaded) as loader:
            reusing = reusing_of(config.correction_bits, device, memory, loader, model)
            yield Engine(
                checkpoint.family,
                Capacity(config.capacity_rows, config.capacity_tokens),
                time.perf_counter,
                checkpoint.preview_map,
                budget=budget_of(config, profile, memory),
                joining=config.batching,
                reusing=reusing,
                trace=trace or UNTRACED,
                low_ranks=low_ranks,
                controls=controls,
            )
    finally:
        if trace is not None and config.trace_folder is not None:
            config.trace_folder.mkdir(parents=True, exist_ok=True)
            trace.write(config.trace_folder / "trace.json")


def reusing_of(
    correction_bits: int | None,
    device: torch.device,
    memory: MemoryBudget,
    loader: Loader,
    model: CostModel,
) -> ReuseOptions:
    """Return how steps on `device` reuse templates."""
    return ReuseOptions(
        loader=loader,
        model=model,
        planner=plan_batch,
        device=device_for(device, memory.device),
        ahead_bytes=memory.ahead,
        correction_bits=correction_bits,
    )


def budget_of(config: DenoiserConfig, profile: Profile, memory: MemoryBudget) -> StepBudget:
    """The limits of one step, by time and memory."""
    return StepBudget(
        step_ms=config.step_limit_ms or math.inf,
        memory_bytes=memory.rows,
        activation_bytes=profile.activation_bytes,
        even_bytes=profile.even_bytes,
    )


def memory_on(config: DenoiserConfig, checkpoint: Checkpoint, spared: int = 0) -> MemoryBudget:
    """:func:`memory_of` what the model and others leave of its device, once `spared` bytes are taken."""
    device = checkpoint.family.device
    if device.type != "cuda":
        return memory_of(config, None)
    torch.cuda.empty_cache()  # of rehearsal and profile
    free, total = torch.cuda.mem_get_info(device)
    own = CONTEXT_BYTES + torch.cuda.memory_reserved(device) + spared
    return shared_memory(config, checkpoint, free - spared, total, own)


def shared_memory(
    config: DenoiserConfig, checkpoint: Checkpoint, free: int, total: int, own: int
) -> MemoryBudget:
    """:func:`memory_of` a GPU of which this process has taken `own` bytes; what it may take is stated in the ledger.

    Of what others have stated, some may be free yet. Where no prepost has stated anything, one of this checkpoint may
    come to this GPU.
    """
    ledger, model = checkpoint.ledger, checkpoint.memory
    room = min(free, int(USABLE * total) - own - ledger.others_bytes())
    if model and all(one.service != ServiceName.PREPOST for one in ledger.others()):
        pixels = checkpoint.card.native_size**2
        room -= plan_prepost(room - model.row(pixels), model, pixels).size_bytes
    memory = memory_of(config, max(0, room))
    ledger.state(own + memory.device + int(memory.rows))
    return memory


def _tell(config: DenoiserConfig, checkpoint: Checkpoint, memory: MemoryBudget) -> None:
    """Log the budgets, and what of a picture's template they leave out: every step would compute that in full."""
    card, depth = checkpoint.card, checkpoint.family.depth
    log.info(
        "budgets",
        templates_mb=memory.templates >> 20,
        first_mb=config.template_first_mb,
        device_mb=memory.device >> 20,
        ahead_mb=memory.ahead >> 20,
        rows_mb=None if math.isinf(memory.rows) else int(memory.rows) >> 20,
    )
    side = card.native_size // card.pixel_multiple
    tokens = side * side + checkpoint.family.network.companions((side, side))
    levels = levels_of(config, checkpoint.family)
    kept, _ = storage_budget(config, checkpoint.family, tokens, levels)
    if kept.levels < levels or kept.first_block:
        log.warning(
            "template_budget_small",
            picture=f"{card.native_size}x{card.native_size}",
            levels=f"{kept.levels} of {levels}",
            blocks=f"{depth - kept.first_block} of {depth}",
            remedy="raise GIORNATA_CACHE_MEMORY_MB, or name a GIORNATA_CACHE_FOLDER",
        )
