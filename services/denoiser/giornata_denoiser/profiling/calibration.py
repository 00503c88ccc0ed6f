"""Costs without a profile: a few small steps at the start, weighed by what the network's blocks have to compute.

Few steps cannot tell tokens from pairs. Their ratio is therefore taken from the number of operations, and only what an
operation, a sequence and a step cost is fitted. Step samples correct it while the denoiser serves.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from giornata.planning.costing import Array, Fit, Profile, fit, graded
from giornata.planning.costs import COMPUTE, LOAD
from giornata.planning.specs import BlockSpec, mean_operations, taking_modes
from giornata.wire.values import Mode
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.profiling.making import Sample, activation_bytes, fitted, profile
from giornata_denoiser.profiling.measuring import Meter
from giornata_denoiser.profiling.mixtures import Mixture, RowSize

LIMIT_S: Final = 1.0
"""No step begins later than this after the first one; a slow model is calibrated on fewer."""
REPEATS: Final = 2
"""Of each measurement, the least counts: nothing makes a step faster than it is, and few are measured."""
RATIO: Final = 0.2
SIDES: Final = (8, 16)
"""Sides of pictures in tokens."""


def calibrate(checkpoint: Checkpoint, bits: int) -> Profile:
    """Costs from a few steps and loads, without batch caps; `bits` are those of recorded templates."""
    family, meter = checkpoint.family, Meter(checkpoint, bits)
    text, modes = meter.text_tokens, taking_modes(family.specs)
    steps = [step.beside(meter.companions, meter.prefix) for step in _steps(family.depth, text, modes)]
    step_samples, end_s = list[Sample](), time.perf_counter() + LIMIT_S
    for step in steps:
        if not step_samples or time.perf_counter() < end_s:
            step_ms = min(meter.step_ms(step) for _ in range(REPEATS))
            step_samples.append(Sample(step.work.features, step_ms))
    sizes = [
        RowSize(side, side, text, (mode,) * family.depth, RATIO).beside(meter.companions, meter.prefix)
        for side in SIDES
        for mode in modes
    ]
    loads = [
        Sample.of_load(meter.load_bytes(size), min(meter.load_ms(size) for _ in range(REPEATS)))
        for size in sizes
    ]
    return profile(
        checkpoint,
        compute=proportional(step_samples, operations(family.network.blocks)),
        load=fitted(LOAD, loads),
        activation=activation_bytes(meter, (steps[0], Mixture(steps[0].rows * 2)), family.depth),
        caps=(),
    )


def operations(blocks: Sequence[BlockSpec]) -> Array:
    """Multiplications and additions of the mean block, by :data:`giornata.planning.costs.COMPUTE`."""
    return np.array([0.0, 0.0, *mean_operations(blocks)])


def proportional(samples: Sequence[Sample], per_unit: Array) -> Fit:
    """A fit that knows the features' ratios: so much an operation, so much a step, so much a sequence and block.

    Three samples tell all three costs apart, fewer only the first ones. `per_unit` is (features,), operations of each.
    """
    features = np.array([sample.features for sample in samples])
    times = np.array([sample.ms for sample in samples])
    columns = np.stack([features @ per_unit, features[:, 0], features[:, 1]], 1)
    known = min(columns.shape[1], len(samples))
    names = ("operations", *COMPUTE[:2])[:known]
    operation, *others = fit(names, columns[:, :known], times, relative=True).weights
    weights = operation * per_unit
    weights[: len(others)] += others
    return graded(COMPUTE, weights, features, times)


def _steps(blocks: int, text: int, modes: Sequence[Mode]) -> tuple[Mixture, ...]:
    """The steps to measure, the cheapest first, since the last ones may be left out."""
    small, large = SIDES
    full, kv, hidden = ((mode,) * blocks for mode in (Mode.FULL, Mode.KV, Mode.HIDDEN))
    whole, masked = RowSize(large, large, text, full), RowSize(large, large, text, kv, RATIO)
    projecting = (Mixture((RowSize(large, large, text, hidden, RATIO),)),) if Mode.HIDDEN in modes else ()
    return (
        Mixture((RowSize(small, small, text, full),)),
        Mixture((masked,)),
        *projecting,
        Mixture((whole,)),
        Mixture((masked, masked)),
        Mixture((whole, whole)),
        Mixture((whole, masked, whole, masked)),
    )
