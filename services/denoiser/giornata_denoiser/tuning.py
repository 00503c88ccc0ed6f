"""Parts of a running engine, from configuration and profile."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

from giornata.packed.tracing import UNTRACED
from giornata.planning.batch import PLANNERS
from giornata.planning.costing import CostModel, Profile
from giornata.scheduling.batch import Capacity
from giornata.wire.workers import LoadSample, Tier
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.loading import Loaded, Loader, device_for
from giornata_denoiser.engine.sources import ReuseOptions
from giornata_denoiser.engine.weighing import Budget
from giornata_denoiser.trace import Trace

SPARED: Final = 0.9
"""Share of a GPU's free memory that rows may fill where no budget is configured."""


@contextmanager
def engine_of(
    config: DenoiserConfig,
    checkpoint: Checkpoint,
    profile: Profile,
    model: CostModel,
    told: Callable[[LoadSample], object] = lambda _: None,
) -> Iterator[Engine]:
    """An engine with its loader, which ends with the context; then the trace is written, if there is one.

    `told` hears of every load that the cost model hears of, in the loader's thread.
    """
    device = checkpoint.family.device
    trace = Trace(device) if config.trace_file is not None else None

    def loaded(load: Loaded) -> None:
        # On a GPU the loader's thread only gives orders; the profile tells how long they take.
        if device.type == "cpu" and load.size_bytes:
            model.observe_load(load.size_bytes, load.ms)
            told(LoadSample(tier=Tier.MEMORY, size_bytes=load.size_bytes, load_ms=load.ms))

    try:
        with Loader(on_loaded=loaded) as loader:
            reusing = ReuseOptions(
                loader=loader,
                model=model,
                planner=PLANNERS[config.planner],
                device=device_for(device, config.template_device_mb << 20),
                ahead_bytes=config.template_ahead_mb << 20,
                correction_bits=config.template_bits if config.template_correction else None,
            )
            yield Engine(
                checkpoint.family,
                Capacity(config.capacity_rows, config.capacity_tokens),
                time.perf_counter,
                checkpoint.preview_map,
                budget=budget_of(config, profile, device),
                joining=config.batching,
                reusing=reusing,
                trace=trace or UNTRACED,
            )
    finally:
        if trace is not None and config.trace_file is not None:
            trace.write(config.trace_file)


def budget_of(config: DenoiserConfig, profile: Profile, device: torch.device) -> Budget:
    """The limits of one step, by time and memory; call it once the model is on the device."""
    return Budget(
        step_ms=config.step_limit_ms or math.inf,
        memory_bytes=_memory_bytes(config, device),
        activation_bytes=profile.activation_bytes,
        caps=profile.caps if config.batch_caps else (),
    )


def _memory_bytes(config: DenoiserConfig, device: torch.device) -> float:
    if config.memory_mb is not None:
        return config.memory_mb << 20
    if device.type != "cuda":
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    return max(0.0, SPARED * free - (config.template_device_mb << 20))
