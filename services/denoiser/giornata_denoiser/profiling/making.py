"""A profile from measurements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from giornata.planning.profile import BatchCap, FitRecord, Profile
from giornata.planning.regression import Fit
from giornata.wire.values import Mode
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.profiling import fitting
from giornata_denoiser.profiling.measuring import LoadTime, StepTime, medians
from giornata_denoiser.profiling.mixtures import Extent, Mixture, RowSize, SlabSize, mixtures, slab_sizes
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
        return [fitting.step_sample(one.mixture.work, one.ms) for one in self.steps]

    @property
    def load_samples(self) -> list[fitting.Sample]:
        """Loads, likewise."""
        return [fitting.load_sample(one.size_bytes, one.ms) for one in self.loads]


class Measuring(Protocol):
    """What :class:`giornata_denoiser.profiling.measuring.Meter` does."""

    def step_ms(self, mixture: Mixture) -> float:
        """Of one step."""

    def step_bytes(self, mixture: Mixture) -> int:
        """Peak memory of one step."""

    def load_ms(self, size: SlabSize) -> float:
        """Of one slab."""

    def load_bytes(self, size: SlabSize) -> int:
        """What has to move for one slab."""


def count(extent: Extent) -> int:
    """How many measurements :func:`measure` takes, each told."""
    rounds = QUICK_ROUNDS if extent.quick else ROUNDS
    return rounds * (len(mixtures(extent, SEED)) + len(slab_sizes(extent)))


def measure(meter: Measuring, extent: Extent, told: Callable[[], object]) -> Measurements:
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


def activation_bytes(meter: Measuring, steps: Iterable[Mixture], blocks: int) -> float:
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
        blocks=checkpoint.family.blocks,
        compute=FitRecord.of(compute),
        load=FitRecord.of(load),
        activation_bytes=activation,
        caps=caps,
    )


def batch_caps(steps: Sequence[StepTime]) -> tuple[BatchCap, ...]:
    """Of the sizes that were measured in growing numbers."""
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
