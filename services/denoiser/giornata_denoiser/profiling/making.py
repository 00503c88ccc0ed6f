"""A profile from measurements: from times to weights.

Residuals are relative: an absolute fit is one to the largest batches alone, whose residuals outweigh all others, and
misses a single small row, which is most of what is served, by more than it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from giornata.planning.costs import completed
from giornata.planning.degrees import DegreeFit, StepParallelism
from giornata.planning.operations import ADAPTING, NETWORK, NetworkOperations
from giornata.planning.profiles import Profile
from giornata.planning.regression import Array, LinearFit, fit, graded
from giornata.wire.values import BlockMode
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.profiling.measuring import ProgressBar, StepMeter, medians
from giornata_denoiser.profiling.members import ProfilerRanks
from giornata_denoiser.profiling.mixtures import (
    ProfileScope,
    StepShape,
    masked_sizes,
    mixtures,
    plain,
    unlike,
)
from giornata_denoiser.profiling.profiles import device_name, dtype_name, versions

QUICK_ROUNDS: Final = 2
ROUNDS: Final = 3
SEED: Final = 0
FOLDS: Final = 5


class StepTime(NamedTuple):
    """What a step took."""

    mixture: StepShape
    ms: float


class FitSample(NamedTuple):
    """One thing measured, for a fit."""

    features: tuple[float, ...]
    ms: float

    @classmethod
    def of_load(cls, size_bytes: int, ms: float) -> FitSample:
        """A load that moved `size_bytes`."""
        return cls((1.0, float(size_bytes)), ms)


class FittedSample(NamedTuple):
    """One thing measured, beside what a fit says."""

    predicted_ms: float
    measured_ms: float

    @property
    def error(self) -> float:
        """The error as a share of the measured time; positive where the fit says more."""
        return self.predicted_ms / self.measured_ms - 1


@dataclass(frozen=True)
class ProfileMeasurements:
    """All that was measured."""

    steps: tuple[StepTime, ...]
    operations: NetworkOperations
    """Operations of the network that was measured."""
    load_samples: tuple[FitSample, ...]
    activation_bytes: tuple[float, float]
    """Per computed token: the most, and of equally long sequences."""

    @property
    def step_samples(self) -> list[FitSample]:
        """Steps, for a fit."""
        return [FitSample(mixture.work(self.operations).features, ms) for mixture, ms in self.steps]


def measure(meter: StepMeter, extent: ProfileScope, bar: ProgressBar = iter) -> ProfileMeasurements:
    """Everything within `extent`."""
    rounds = QUICK_ROUNDS if extent.quick else ROUNDS
    steps = [
        mixture.beside(meter.companions, meter.prefix).adapted(meter.lora_weights, meter.control_work)
        for mixture in mixtures(extent, SEED)
    ]
    loads = [size.beside(meter.companions, meter.prefix) for size in masked_sizes(extent)]
    step_ms = medians(steps, meter.step_ms, rounds=rounds, seed=SEED, bar=bar)
    load_ms = medians(loads, meter.load_ms, rounds=rounds, seed=SEED, bar=bar)
    return ProfileMeasurements(
        tuple(map(StepTime, steps, step_ms)),
        meter.operations,
        tuple(map(FitSample.of_load, map(meter.load_bytes, loads), load_ms)),
        activation_bytes(meter, steps),
    )


def measure_spread(
    members: ProfilerRanks, meter: StepMeter, extent: ProfileScope, bar: ProgressBar = iter
) -> dict[StepParallelism, ProfileMeasurements]:
    """Steps within `extent` that several devices compute, in every way that they can; loads are one device's."""
    rounds = QUICK_ROUNDS if extent.quick else ROUNDS
    found: dict[StepParallelism, ProfileMeasurements] = {}
    for way in members.ways:
        steps = [one.beside(meter.companions, meter.prefix) for one in plain(extent, SEED, guided=way.halves)]
        step_ms = medians(steps, partial(members.step_ms, way), rounds=rounds, seed=SEED, bar=bar)
        found[way] = ProfileMeasurements(
            tuple(map(StepTime, steps, step_ms)), meter.operations, (), (0.0, 0.0)
        )
    return found


def activation_bytes(meter: StepMeter, steps: Iterable[StepShape]) -> tuple[float, float]:
    """Peak memory per token, over the steps in which one row computes everything, or two do: of all, and of even ones.

    Modulation of equally long sequences is broadcast, that of others may be spread to their tokens. Where two rows are
    measured, a row beside one of other lengths is, too. What ControlNets hold is theirs, and not counted.
    """
    whole = [
        mixture
        for mixture in steps
        if len(mixture.rows) <= 2
        and all(set(row.modes) == {BlockMode.FULL} and not row.controlled for row in mixture.rows)
    ]
    whole += [
        StepShape((mixture.rows[0], unlike(mixture.rows[0]).beside(meter.companions, meter.prefix)))
        for mixture in whole
        if len(mixture.rows) > 1
    ]
    found = [(meter.step_bytes(mixture) / mixture.length, mixture) for mixture in whole]
    even = [each for each, mixture in found if len({row.shapes for row in mixture.rows}) == 1]
    return max(each for each, _ in found), max(even)


def fitted(names: Sequence[str], samples: Sequence[FitSample]) -> LinearFit:
    """Over :data:`giornata.planning.operations.COMPUTE` or :data:`giornata.planning.costs.LOAD`.

    Where no sample has any of what adapters add, that weight follows from the others.

    Raises:
        ValueError: samples are fewer than features.
    """
    features, times = _arrays(samples)
    found = fit(names, features, times, relative=True)
    derived = tuple(name for name in ADAPTING if name in names and not features[:, names.index(name)].any())
    if not derived:
        return found
    known = completed(found.weights[: len(NETWORK)])
    weights = (
        ours if name in derived else own for name, own, ours in zip(names, found.weights, known, strict=True)
    )
    return found.model_copy(update={"weights": tuple(weights), "derived": derived})


def predictions(found: LinearFit, samples: Iterable[FitSample]) -> list[FittedSample]:
    """What a fit says of `samples`, in their order."""
    return [FittedSample(found.predict(sample.features), sample.ms) for sample in samples]


def unseen(names: Sequence[str], samples: Sequence[FitSample]) -> LinearFit:
    """How good fits are on samples that they have not seen: each fifth is predicted by a fit to the others.

    Raises:
        ValueError: four fifths of the samples are fewer than features.
    """
    features, times = _arrays(samples)
    fold = np.arange(len(times)) % FOLDS
    said = np.zeros(len(times))
    for one in range(min(FOLDS, len(times))):
        others = fit(names, features[fold != one], times[fold != one], relative=True)
        said[fold == one] = features[fold == one] @ np.asarray(others.weights)
    return graded(("predicted",), np.ones(1), said[:, None], times)


def profile(
    checkpoint: Checkpoint,
    *,
    compute: LinearFit,
    load: LinearFit,
    activation: tuple[float, float],
    degrees: tuple[DegreeFit, ...] = (),
) -> Profile:
    """What was fitted, with today's date, where and of what; `activation` as :func:`activation_bytes` tells it."""
    return Profile(
        model=checkpoint.card.name,
        model_digest=checkpoint.card.digest,
        device=device_name(checkpoint.family.device),
        dtype=dtype_name(checkpoint.family.dtype),
        versions=versions(),
        measured_on=datetime.now(UTC).date().isoformat(),
        blocks=checkpoint.family.operations.specs,
        compute=compute,
        degrees=degrees,
        load=load,
        activation_bytes=activation[0],
        even_bytes=activation[1],
    )


def _arrays(samples: Sequence[FitSample]) -> tuple[Array, Array]:
    """(samples, features) and (samples,)."""
    return np.array([sample.features for sample in samples]), np.array([sample.ms for sample in samples])
