"""Costs without a profile: a few small steps at the start, weighed by what the network's blocks have to compute.

Few steps cannot tell tokens from pairs. Their ratio is therefore taken from the number of operations, and only what an
operation, a sequence and a step cost is fitted. Step samples correct it while the denoiser serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import numpy as np

from giornata.planning.costing import Array, Fit, Profile, fit, graded
from giornata.planning.costs import COMPUTE
from giornata.planning.specs import BlockSpec, mean_operations
from giornata.wire.values import Mode
from giornata_denoiser.blocks.device import Device
from giornata_denoiser.checkpoints.checkpoint import Checkpoint
from giornata_denoiser.profiling import fitting
from giornata_denoiser.profiling.making import activation_bytes, profile
from giornata_denoiser.profiling.measuring import Clock, Meter
from giornata_denoiser.profiling.mixtures import Mixture, RowSize, SlabSize
from giornata_denoiser.profiling.rows import Workpieces

LIMIT_S: Final = 1.0
"""No step begins later than this after the first one; a slow model is calibrated on fewer."""
REPEATS: Final = 2
RATIO: Final = 0.2
SIDES: Final = (8, 16)
"""Sides of pictures in tokens."""
T = TypeVar("T")


def calibrate(checkpoint: Checkpoint, bits: int, device: Device, clock: Clock, measured_on: str) -> Profile:
    """Costs from a few steps and loads, without batch caps.

    Args:
        checkpoint: to be served.
        bits: of recorded templates.
        device: as loads get there; see :class:`giornata_denoiser.profiling.rows.Workpieces`.
        clock: monotonic seconds.
        measured_on: date, ISO 8601.
    """
    family = checkpoint.family
    workpieces = Workpieces(checkpoint, bits, device)
    meter = Meter(workpieces, clock)
    text = checkpoint.card.max_text_tokens
    steps = _steps(family.depth, text)
    step_samples = [
        fitting.Sample(mixture.work.features, ms)
        for mixture, ms in _within(LIMIT_S, clock, steps, lambda step: _least(meter.step_ms, step))
    ]
    load_samples = [
        fitting.Sample.of_load(meter.load_bytes(size), _least(meter.load_ms, size))
        for size in (
            SlabSize(side, side, text, RATIO, mode) for side in SIDES for mode in (Mode.HIDDEN, Mode.KV)
        )
    ]
    return profile(
        checkpoint,
        compute=proportional(step_samples, operations(family.network.blocks)),
        load=fitting.load_fit(load_samples),
        activation=activation_bytes(meter, steps[:1], family.depth),
        caps=(),
        measured_on=measured_on,
    )


def operations(blocks: Sequence[BlockSpec]) -> Array:
    """Multiplications and additions of the mean block, by :data:`giornata.planning.costs.COMPUTE`."""
    return np.array([0.0, 0.0, *mean_operations(blocks)])


def proportional(samples: Sequence[fitting.Sample], per_unit: Array) -> Fit:
    """A fit that knows the features' ratios: so much an operation, so much a step, so much a sequence and block.

    Args:
        samples: at least one; three tell all three costs apart, fewer only the first ones.
        per_unit: operations by feature, (features,).
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


def _steps(blocks: int, text: int) -> tuple[Mixture, ...]:
    """The steps to measure, the cheapest first, since the last ones may be left out."""
    small, large = SIDES
    full, kv, hidden = ((mode,) * blocks for mode in (Mode.FULL, Mode.KV, Mode.HIDDEN))
    whole, masked = RowSize(large, large, text, full), RowSize(large, large, text, kv, RATIO)
    return (
        Mixture((RowSize(small, small, text, full),)),
        Mixture((masked,)),
        Mixture((RowSize(large, large, text, hidden, RATIO),)),
        Mixture((whole,)),
        Mixture((masked, masked)),
        Mixture((whole, whole)),
        Mixture((whole, masked, whole, masked)),
    )


def _within(
    limit_s: float, clock: Clock, steps: Sequence[Mixture], measure: Callable[[Mixture], float]
) -> list[tuple[Mixture, float]]:
    """The times of the first of `steps`, as many as begin in time; of one at least."""
    end = clock() + limit_s
    return [(step, measure(step)) for index, step in enumerate(steps) if index == 0 or clock() < end]


def _least(measure: Callable[[T], float], thing: T) -> float:
    """The least of a few: nothing makes a step faster than it is, and few are measured."""
    return min(measure(thing) for _ in range(REPEATS))
