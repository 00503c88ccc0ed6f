"""A profile from measurements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from giornata.planning.costing import BatchCap, Fit, Profile
from giornata.wire.values import Mode
from giornata_denoiser.checkpoints.checkpoint import Checkpoint
from giornata_denoiser.profiling import fitting
from giornata_denoiser.profiling.measuring import LoadTime, Meter, StepTime, medians
from giornata_denoiser.profiling.mixtures import Extent, Mixture, RowSize, mixtures, slab_sizes
from giornata_denoiser.profiling.profiles import device_name, dtype_name, versions

QUICK_ROUNDS = 2
ROUNDS = 3
SEED = 0


@dataclass(frozen=True)
class Measurements:
    """All that was measured."""

    steps: tuple[StepTime, ...]
    loads: tuple[LoadTime, ...]
    activation_bytes: float
    """Per computed token."""

    @property
    def step_samples(self) -> list[fitting.Sample]:
        """Steps, for a fit."""
        return [fitting.Sample(one.mixture.work.features, one.ms) for one in self.steps]

    @property
    def load_samples(self) -> list[fitting.Sample]:
        """Loads, for a fit."""
        return [fitting.Sample.of_load(one.size_bytes, one.ms) for one in self.loads]


def count(extent: Extent) -> int:
    """How many measurements :func:`measure` takes, each told."""
    rounds = QUICK_ROUNDS if extent.quick else ROUNDS
    return rounds * (len(mixtures(extent, SEED)) + len(slab_sizes(extent)))


def measure(meter: Meter, extent: Extent, told: Callable[[], object]) -> Measurements:
    """Everything within `extent`; `told` is called after every measurement."""
    rounds = QUICK_ROUNDS if extent.quick else ROUNDS
    steps, loads = mixtures(extent, SEED), slab_sizes(extent)
    step_ms = medians(steps, meter.step_ms, rounds=rounds, seed=SEED, told=told)
    load_ms = medians(loads, meter.load_ms, rounds=rounds, seed=SEED, told=told)
    return Measurements(
        tuple(map(StepTime, steps, step_ms)),
        tuple(map(LoadTime, map(meter.load_bytes, loads), load_ms)),
        activation_bytes(meter, steps, extent.blocks),
    )


def activation_bytes(meter: Meter, steps: Iterable[Mixture], blocks: int) -> float:
    """Peak memory per token, over the steps in which one row computes everything."""
    alone = [
        mixture for mixture in steps if len(mixture.rows) == 1 and set(mixture.rows[0].modes) == {Mode.FULL}
    ]
    return max(meter.step_bytes(mixture) / (mixture.work.tokens / blocks) for mixture in alone)


def profile(
    checkpoint: Checkpoint,
    *,
    compute: Fit,
    load: Fit,
    activation: float,
    caps: tuple[BatchCap, ...],
    measured_on: str,
) -> Profile:
    """What was fitted, with where and of what.

    Args:
        checkpoint: that was measured.
        compute: over :data:`giornata.planning.costs.COMPUTE`.
        load: over :data:`giornata.planning.costs.LOAD`.
        activation: bytes per computed token.
        caps: by size.
        measured_on: date, ISO 8601.
    """
    return Profile(
        model=checkpoint.card.name,
        model_digest=checkpoint.card.digest,
        device=device_name(checkpoint.family.device),
        dtype=dtype_name(checkpoint.family.dtype),
        versions=versions(),
        measured_on=measured_on,
        blocks=checkpoint.family.depth,
        compute=compute,
        load=load,
        activation_bytes=activation,
        caps=caps,
    )


def batch_caps(steps: Sequence[StepTime]) -> tuple[BatchCap, ...]:
    """Caps of the sizes that were measured in growing numbers."""
    sweeps: dict[RowSize, dict[int, float]] = defaultdict(dict)
    for mixture, ms in steps:
        if mixture.alike:
            sweeps[mixture.rows[0]][len(mixture.rows)] = ms
    return fitting.caps(
        (size.tokens, rows, ms)
        for size, by_rows in sweeps.items()
        if len(by_rows) > 1
        for rows, ms in by_rows.items()
    )
