"""The start of an engine: shares of memory, its parts, and steps of empty pictures before the first edit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, cast

import structlog
import torch
from torch import Tensor, nn

from giornata.model_cards import CONTEXT_BYTES, USABLE, plan_prepost
from giornata.packed.low_rank import FactorSpan, LowRankFactors, add_products
from giornata.packed.packing import UNTRACED, Region, make_region, with_companions
from giornata.planning.cost_model import CostModel, Profile
from giornata.planning.plans import plan_batch
from giornata.runtime import memory_bytes
from giornata.scheduling.batch import Capacity, RowKey
from giornata.tensors import NEGATIVE
from giornata.wire.errors import Failed
from giornata.wire.values import BlockMode
from giornata.wire.workers import LoadSample, ServiceName
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.choices import CacheForm
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.engine.batch_tensors import ControlPart, LowRanks
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.loading import Loader, device_for, load_teller
from giornata_denoiser.engine.step_budget import StepBudget
from giornata_denoiser.engine.step_plan import ReuseOptions
from giornata_denoiser.families.network import ModelFamily, build_row, text_shapes
from giornata_denoiser.rows.row import GENERATOR, RecordingSpec, Row, RowReuse
from giornata_denoiser.rows.template import CachedTemplate, template_generator
from giornata_denoiser.templates.runs import levels_of, storage_budget
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
        ahead,
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
    controls: ControlPart | None = None,
) -> Iterator[Engine]:
    """An engine with its loader, which ends with the context; then the trace is written, if there is one.

    `told` hears of every load that the cost model hears of, in the loader's thread. `low_ranks`
    holds the LoRAs of rows, `controls` their ControlNets.
    """
    device = checkpoint.family.device
    memory = memory_on(config, checkpoint)
    _tell(config, checkpoint, memory)
    trace = Trace(device) if config.trace_folder is not None else None

    try:
        with Loader(on_loaded=load_teller(device, model, told)) as loader:
            reusing = reusing_of(config.correction_bits, device, memory, loader, model)
            yield Engine(
                checkpoint.family,
                Capacity(config.capacity_rows, config.capacity_tokens),
                time.perf_counter,
                checkpoint.preview_map,
                budget=StepBudget(memory.rows, profile.activation_bytes, profile.even_bytes),
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
        loader, model, plan_batch, device_for(device, memory.device), memory.ahead, correction_bits
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


GRID: Final = (16, 16)
"""Height and width of the picture in tokens."""
CPU_GRID: Final = (2, 2)
"""Those on a CPU: no kernel waits to be compiled there, and a UNet of 16x16 tokens computes for ten seconds."""
RANK: Final = 16
"""That of most LoRAs that are published."""


def rehearse(checkpoint: Checkpoint) -> None:
    """Compute two steps in this thread; on a GPU also a template and edits that take from it, in each form.

    One of these is guided where the model can be, and LoRAs' products are computed; what ControlNets add takes no other
    kernels. Triton compiles one where it is first launched, and libraries load theirs: no edit is to wait for that.

    Raises:
        Failed: a step raised, its result is not finite, or it does not fit into the GPU's memory.
    """
    family, card = checkpoint.family, checkpoint.card
    grid = GRID if family.device.type == "cuda" else CPU_GRID
    made = partial(practice_row, checkpoint, grid=grid, text_tokens=card.max_text_tokens, values=torch.zeros)
    guided = (False, card.takes_negative_prompt)
    rows = [made(RowKey("rehearsal", 0, index), guided=each) for index, each in enumerate(guided)]
    if family.device.type != "cuda":
        _finished(family, rows[:1])
        return
    kept = [form for form in CacheForm if any(spec.channels([BlockMode(form)]) for spec in family.specs)]
    where = with_companions(
        cast("Region", make_region(torch.eye(*GRID) > 0)), family.network.companions(GRID)
    )
    try:
        for form in kept:
            [run] = _finished(family, [replace(rows[0], records=RecordingSpec(frozenset({form}), 8))])
            taken = CachedTemplate("rehearsal", GRID, run.entries)
            _finished(family, [replace(row, region=where, reuse=RowReuse(taken)) for row in rows])
        _multiply_low_ranks(family)
    except torch.OutOfMemoryError as error:
        free, total = (size >> 20 for size in torch.cuda.mem_get_info(family.device))
        message = f"The GPU's memory holds {card.name} and no step; `giornata doctor` tells what fits."
        raise Failed(message, received=f"{free} of {total} MiB free") from error


def _multiply_low_ranks(family: ModelFamily) -> None:
    """Compute a LoRA's product of each size, past the hooks: a network that meets no LoRA is called without."""
    tokens = GRID[0] * GRID[1]
    zeros = partial(torch.zeros, device=family.device, dtype=family.dtype)
    layers = (layer for layer in family.network.layers.values() if isinstance(layer, nn.Linear))
    for outputs, inputs in {layer.weight.shape for layer in layers}:
        acting = FactorSpan(LowRankFactors(zeros(RANK, inputs), zeros(outputs, RANK)), 0, tokens)
        add_products(zeros(tokens, inputs), zeros(tokens, outputs), [acting])


def _finished(family: ModelFamily, rows: Sequence[Row]) -> list[Row]:
    how = ReuseOptions(device=device_for(family.device, 0))
    engine = Engine(family, Capacity(rows=len(rows), tokens=1 << 20), lambda: 0.0, reusing=how)
    engine.batch.submit(rows)
    done: list[Row] = []
    while (report := engine.step()) is not None:  # a step may be judged in the next one
        for failure in report.failed:
            cause = failure.error.__cause__ or failure.error
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause
            message = "The model cannot compute a picture; is its dtype right?"
            raise Failed(message, received=repr(cause)) from failure.error
        done += [row for row in report.advanced if row.done]
    return done


def practice_row(
    checkpoint: Checkpoint,
    key: RowKey,
    grid: tuple[int, int],
    text_tokens: int,
    values: Callable[..., Tensor],
    *,
    guided: bool = False,
) -> Row:
    """A row whose sizes matter and whose values do not: `values` makes a tensor of a shape."""
    family, tokens = checkpoint.family, grid[0] * grid[1]
    return build_row(
        family,
        key,
        grid=grid,
        track=family.schedule.track(
            sampler=family.schedule.default_sampler, steps=2, strength=1.0, cells=tokens
        ),
        text={
            f"{sign}{name}": values(*shape)
            for sign in (("", NEGATIVE) if guided else ("",))
            for name, shape in text_shapes(family, text_tokens).items()
        },
        conditioning={
            name: values(tokens, channels) for name, channels in family.network.conditioning.items()
        }
        | {GENERATOR: template_generator()},
        guidance_scale=checkpoint.card.embedded_guidance_scale,
        true_cfg_scale=2.0 if guided else None,
    )
