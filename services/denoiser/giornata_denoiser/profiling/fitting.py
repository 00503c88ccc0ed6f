"""Profiles from measurements: costs that are fitted to times."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from pydantic import ValidationError

from giornata.planning.cost_model import (
    Array,
    DegreeFit,
    LinearFit,
    Profile,
    StepParallelism,
    fit,
    grade_fit,
    robust_fit,
)
from giornata.planning.operations import (
    ADAPTING,
    COMPUTE,
    LOAD,
    NETWORK,
    NetworkOperations,
    complete_weights,
    taking_modes,
)
from giornata.wire.errors import Failed
from giornata.wire.models import BlockSpec
from giornata.wire.values import BlockMode
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.profiling.measuring import ProgressBar, StepMeter, measure_medians
from giornata_denoiser.profiling.mixtures import (
    ProfileScope,
    RowSize,
    StepShape,
    list_mixtures,
    masked_sizes,
    unlike,
)
from giornata_denoiser.profiling.ranks import ProfilerRanks

# Residuals are relative: an absolute fit is one to the largest batches alone, whose residuals outweigh all
# others, and misses a single small row, which is most of what is served, by more than it takes.


QUICK_ROUNDS: Final = 2
ROUNDS: Final = 3
SEED: Final = 0
FOLDS: Final = 5


class StepTime(NamedTuple):
    """The time of one step and what it computed."""

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
        return [FitSample(mixture.work(self.operations), ms) for mixture, ms in self.steps]


def measure(meter: StepMeter, extent: ProfileScope, bar: ProgressBar = iter) -> ProfileMeasurements:
    """Everything within `extent`."""
    rounds = QUICK_ROUNDS if extent.quick else ROUNDS
    steps = _counted(meter, list_mixtures(extent, SEED))
    loads = [size.beside(meter.companions, meter.prefix) for size in masked_sizes(extent)]
    step_ms = measure_medians(steps, meter.step_ms, rounds=rounds, seed=SEED, bar=bar)
    load_ms = measure_medians(loads, meter.load_ms, rounds=rounds, seed=SEED, bar=bar)
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
        steps = _counted(meter, list_mixtures(extent, SEED, guided=way.halves))
        step_ms = measure_medians(steps, partial(members.step_ms, way), rounds=rounds, seed=SEED, bar=bar)
        found[way] = ProfileMeasurements(
            tuple(map(StepTime, steps, step_ms)), meter.operations, (), (0.0, 0.0)
        )
    return found


def _counted(meter: StepMeter, mixtures: Iterable[StepShape]) -> list[StepShape]:
    """`mixtures` with the tokens that the family has beside a picture, and the work of LoRAs and ControlNets."""
    return [
        mixture.beside(meter.companions, meter.prefix).adapted(meter.lora_weights, meter.control_work)
        for mixture in mixtures
    ]


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


def fit_samples(names: Sequence[str], samples: Sequence[FitSample]) -> LinearFit:
    """Over :data:`giornata.planning.operations.COMPUTE` or :data:`giornata.planning.operations.LOAD`.

    Where no sample has any of what adapters add, that weight follows from the others.

    Raises:
        ValueError: samples are fewer than features.
    """
    features, times = _arrays(samples)
    found = robust_fit(names, features, times)
    derived = tuple(name for name in ADAPTING if name in names and not features[:, names.index(name)].any())
    if not derived:
        return found
    known = complete_weights(found.weights[: len(NETWORK)])
    weights = (
        ours if name in derived else own for name, own, ours in zip(names, found.weights, known, strict=True)
    )
    return found.model_copy(update={"weights": tuple(weights), "derived": derived})


def predictions(found: LinearFit, samples: Iterable[FitSample]) -> list[FittedSample]:
    """Return what a fit says of `samples`, in their order."""
    return [FittedSample(found.predict(sample.features), sample.ms) for sample in samples]


def cross_validate(names: Sequence[str], samples: Sequence[FitSample]) -> LinearFit:
    """Return how good fits are on samples that they have not seen: each fifth is predicted by a fit to the others.

    Raises:
        ValueError: four fifths of the samples are fewer than features.
    """
    features, times = _arrays(samples)
    fold = np.arange(len(times)) % FOLDS
    said = np.zeros(len(times))
    for one in range(min(FOLDS, len(times))):
        others = robust_fit(names, features[fold != one], times[fold != one])
        said[fold == one] = features[fold == one] @ np.asarray(others.weights)
    return grade_fit(("predicted",), np.ones(1), said[:, None], times)


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


# Few steps cannot tell kinds of operations apart. All are therefore taken to cost the same, and only what
# an operation, a forward, a sequence and a gathered value cost is fitted. Step samples correct it while the
# denoiser serves.


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
            step_samples.append(FitSample(step.work(family.operations), step_ms))
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
        compute=proportional_fit(step_samples),
        load=fit_samples(LOAD, loads),
        activation=activation_bytes(meter, (steps[0], StepShape(steps[0].rows * 2))),
    )


def proportional_fit(samples: Sequence[FitSample]) -> LinearFit:
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
    completed_by = complete_weights(tuple(weights[: len(NETWORK)].tolist()))
    found = grade_fit(COMPUTE, np.array(completed_by), features, times)
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
    """Return what steps cost: as the configured file says, else as a few steps show now.

    Raises:
        Failed: the file is missing, or of another model, device or dtype.
    """
    if config.profile is not None:
        return read_profile(config.profile, checkpoint)
    return calibrate(checkpoint, config.template_bits)


AGAIN: Final = "measure it again with `giornata profile`, or leave it out"


def read_profile(path: Path, checkpoint: Checkpoint) -> Profile:
    """The profile in `path`, which is one of `checkpoint` where it is now.

    Raises:
        Failed: there is none, it is derived and not measured, or of another model, device or dtype; the error says
            which.
    """
    try:
        profile = Profile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise Failed(f"The profile {path} cannot be read: {error.strerror}; {AGAIN}.") from error
    except ValidationError as error:
        raise Failed(f"{path} is not a profile; {AGAIN}. {error}") from error
    if profile.derived:
        raise Failed(
            f"The profile {path} was not measured, but derived from {profile.derived}; it is for simulations alone: "
            f"{AGAIN}."
        )
    for what, received, accepted in _facts(profile, checkpoint):
        if str(received) != accepted:
            raise Failed(
                f"The profile {path} is of another {what}; {AGAIN}.", received=received, accepted=accepted
            )
    return profile


def write_profile(path: Path, profile: Profile) -> None:
    """Replace `path`, making its folder; OSError where that cannot be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(profile.model_dump_json(indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)


def device_name(device: torch.device) -> str:
    """A GPU's name; the processor's, with the threads that torch computes with."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, threads: {torch.get_num_threads()}"


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name in configurations."""
    return str(dtype).removeprefix("torch.")


def versions() -> dict[str, str]:
    """Versions of what decides how long a step takes."""
    packages = ("giornata-denoiser", "torch", "diffusers")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def _facts(profile: Profile, checkpoint: Checkpoint) -> list[tuple[str, object, str]]:
    """Return what has to be equal: its name, the profile's, the checkpoint's."""
    family, card = checkpoint.family, checkpoint.card
    return [
        ("model", profile.model_digest[:12], card.digest[:12]),
        ("network", _told(profile.blocks), _told(family.operations.specs)),
        ("dtype", profile.dtype, dtype_name(family.dtype)),
        ("device", profile.device, device_name(family.device)),
    ]


def _told(blocks: Sequence[BlockSpec]) -> str:
    """Return how many blocks there are, and how much they multiply for a cell."""
    cell = sum(spec.count * (spec.linear + spec.convolution + spec.across) for spec in blocks)
    return f"{sum(spec.count for spec in blocks)} blocks of {cell:.0f} multiplications a cell"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
