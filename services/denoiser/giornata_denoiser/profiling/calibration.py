"""Costs without a profile: a few small steps at the start, weighed by what the network's blocks have to compute.

Few steps cannot tell kinds of operations apart. All are therefore taken to cost the same, and only what an operation, a
forward, a sequence and a gathered value cost is fitted. Step samples correct it while the denoiser serves.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from giornata.planning.costs import LOAD, completed
from giornata.planning.operations import ADAPTING, COMPUTE, NETWORK
from giornata.planning.profiles import Profile
from giornata.planning.regression import LinearFit, fit, graded
from giornata.planning.specs import taking_modes
from giornata.wire.values import BlockMode
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.profiling.making import FitSample, activation_bytes, fitted, profile
from giornata_denoiser.profiling.measuring import StepMeter
from giornata_denoiser.profiling.mixtures import RowSize, StepShape
from giornata_denoiser.profiling.profiles import read_profile

LIMIT_S: Final = 1.0
"""No step begins later than this after the first one; a slow model is calibrated on fewer."""
REPEATS: Final = 2
"""Repeats of a measurement. The least counts, since disturbances only make steps slower."""
COSTS: Final = tuple(
    [COMPUTE.index(name) for name in names]
    for names in (("linear", "attention", "convolution"), ("calls",), ("sequences",), ("gathered",))
)
"""The features that have one cost; what fewer samples than costs cannot tell is last."""
RATIO: Final = 0.2
SIDES: Final = (8, 16)
"""Sides of pictures in tokens."""


def calibrate(checkpoint: Checkpoint, bits: int) -> Profile:
    """Costs from a few steps and loads; `bits` are those of recorded templates."""
    family, meter = checkpoint.family, StepMeter(checkpoint, bits)
    text, modes = meter.text_tokens, taking_modes(family.specs)
    steps = [step.beside(meter.companions, meter.prefix) for step in _steps(family.depth, text, modes)]
    step_samples, end_s = list[FitSample](), time.perf_counter() + LIMIT_S
    for step in steps:
        if not step_samples or time.perf_counter() < end_s:
            step_ms = min(meter.step_ms(step) for _ in range(REPEATS))
            step_samples.append(FitSample(step.work(family.operations).features, step_ms))
    sizes = [
        RowSize(side, side, text, (mode,) * family.depth, RATIO).beside(meter.companions, meter.prefix)
        for side in SIDES
        for mode in modes
    ]
    loads = [
        FitSample.of_load(meter.load_bytes(size), min(meter.load_ms(size) for _ in range(REPEATS)))
        for size in sizes
    ]
    return profile(
        checkpoint,
        compute=proportional(step_samples),
        load=fitted(LOAD, loads),
        activation=activation_bytes(meter, (steps[0], StepShape(steps[0].rows * 2))),
    )


def proportional(samples: Sequence[FitSample]) -> LinearFit:
    """A fit that knows no kinds: so much a multiplication, so much a forward, a sequence, and a value that is gathered.

    As many samples as costs tell all of them apart, fewer only the first ones.
    """
    features = np.array([sample.features for sample in samples])
    times = np.array([sample.ms for sample in samples])
    costs = COSTS[: len(samples)]
    columns = np.stack([features[:, cost].sum(1) for cost in costs], 1)
    weights = np.zeros(len(COMPUTE))
    names = tuple(COMPUTE[cost[0]] for cost in costs)
    for cost, weight in zip(costs, fit(names, columns, times, relative=True).weights, strict=True):
        weights[list(cost)] = weight
    completed_by = completed(tuple(weights[: len(NETWORK)].tolist()))
    found = graded(COMPUTE, np.array(completed_by), features, times)
    return found.model_copy(update={"derived": ADAPTING})


def _steps(blocks: int, text: int, modes: Sequence[BlockMode]) -> tuple[StepShape, ...]:
    """The steps to measure, the cheapest first, since the last ones may be left out."""
    small, large = SIDES
    full, kv, hidden = ((mode,) * blocks for mode in (BlockMode.FULL, BlockMode.KV, BlockMode.HIDDEN))
    whole, masked = RowSize(large, large, text, full), RowSize(large, large, text, kv, RATIO)
    projecting = (
        (StepShape((RowSize(large, large, text, hidden, RATIO),)),) if BlockMode.HIDDEN in modes else ()
    )
    return (
        StepShape((RowSize(small, small, text, full),)),
        StepShape((masked,)),
        *projecting,
        StepShape((whole,)),
        StepShape((masked, masked)),
        StepShape((whole, whole)),
        StepShape((whole, masked, whole, masked)),
    )


def profile_of(config: DenoiserConfig, checkpoint: Checkpoint) -> Profile:
    """What steps cost: as the configured file says, else as a few steps show now.

    Raises:
        Failed: the file is missing, or of another model, device or dtype.
    """
    if config.profile is not None:
        return read_profile(config.profile, checkpoint)
    return calibrate(checkpoint, config.template_bits)
