"""A scheduler of diffusers as a table of small matrices, found by running the scheduler itself.

Every sampler that is served is linear: the sample that `step` returns, and what the scheduler remembers, are sums of
the sample, the network's output, fresh noise and what was remembered before, with numbers that depend on the step
alone. So the scheduler runs once on unit vectors in place of pictures: the first one is the sample, another one the
output of each step. What it holds after a step, as a combination of what it held before, is the step's matrix.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from giornata_denoiser.rows.row import STATES, SamplerTable

SPARE: Final = 32
"""Coordinates that no unit vector has: there, noise is not mistaken for samples or outputs."""
LINEAR: Final = 1e-5
"""How far a state may be from the combination that stands for it, relative to the largest number in it."""
SAME: Final = 1e-9
"""Singular values below this share of the largest one mean that columns depend on each other."""
NOTHING: Final = 3e-7
"""Numbers below this, relative to the largest one of their row, are rounding."""

Vector: TypeAlias = npt.NDArray[np.float64]


@dataclass
class _SchedulerTrace:
    """A trace of a scheduler's state and answers, step by step."""

    states: list[list[Vector]]
    """Before each step and after the last: the sample, then what is remembered."""
    outputs: list[Vector] = field(default_factory=list)
    noises: list[Vector] = field(default_factory=list)
    inputs: list[float] = field(default_factory=list)
    levels: list[tuple[float, float]] = field(default_factory=list)
    """Picture and noise in a noised picture before each step."""


def solve_track(
    scheduler: Any, first: int, *, levels: torch.Tensor, begin: float | None = None, prediction: str
) -> SamplerTable:
    """The track of `scheduler`, whose timesteps are set, from its timestep `first` on.

    `levels` are (evaluations + 1,). `prediction` is what the network predicts, in diffusers' words: epsilon,
    v_prediction, sample or flow_prediction. A row begins from noise times `begin`, or with None from the noised
    picture.

    Raises:
        ValueError: a step is not linear, or not finite.
    """
    times = scheduler.timesteps[first:]
    run = _run(scheduler, first, times)
    outside = [*run.levels, (1.0, 0.0)]
    if begin is not None:
        outside[0] = (0.0, begin)
    return SamplerTable(
        times=times.to(torch.float32).clone(),
        levels=levels.to(torch.float32).clone(),
        inputs=torch.tensor(run.inputs, dtype=torch.float32),
        matrices=torch.from_numpy(_matrices(run, type(scheduler).__name__)).to(torch.float32),
        outside=torch.tensor(outside, dtype=torch.float32),
        begins_whole=run.levels[0],
        clean=torch.tensor([_clean(prediction, *level) for level in run.levels], dtype=torch.float32),
        noise_dtype=_noise_dtype(scheduler),
    )


def _run(scheduler: Any, first: int, times: torch.Tensor) -> _SchedulerTrace:
    """The scheduler's own steps, from unit vectors of shape (1, coordinates): some solvers want a batch."""
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(first)
    units = torch.eye(1 + len(times), 1 + len(times) + SPARE, dtype=torch.float64).unsqueeze(1)
    sample = units[0]
    run = _SchedulerTrace([[_vector(sample)]])
    draws = "generator" in inspect.signature(scheduler.step).parameters
    for step, time in enumerate(times):
        run.levels.append(_noised(scheduler, time))
        run.inputs.append(
            float(scheduler.scale_model_input(torch.ones(1), time)) if _scales(scheduler) else 1.0
        )
        run.outputs.append(_vector(units[1 + step]))
        noise = torch.randn(
            sample.shape, generator=_generator(step), dtype=_noise_dtype(scheduler) or torch.float64
        )
        run.noises.append(_vector(noise))
        drawing = {"generator": _generator(step)} if draws else {}
        sample = scheduler.step(units[1 + step], time, sample, return_dict=False, **drawing)[0].double()
        run.states.append([_vector(sample), *_remembered(scheduler, sample.shape)])
    return run


def _remembered(scheduler: Any, shape: torch.Size) -> list[Vector]:
    """Every tensor of `shape` that the scheduler holds, each once.

    What equals the sample stays apart from it: a pipeline may blend the sample before the next step.
    """
    held: list[Vector] = []
    for _, value in sorted(vars(scheduler).items()):
        for each in value if isinstance(value, list) else [value]:
            if torch.is_tensor(each) and each.shape == shape:
                vector = _vector(each)
                if not any(np.array_equal(vector, other) for other in held):
                    held.append(vector)
    return held


def _matrices(run: _SchedulerTrace, name: str) -> npt.NDArray[np.float64]:
    """(steps, states, 2 + states): zero where a step has fewer states than another."""
    found = [
        _solved(
            np.stack([noise, output, *before], axis=1),
            np.stack(after, axis=1),
            f"{name} is not linear in step {step}",
        )
        for step, (output, noise, before, after) in enumerate(
            zip(run.outputs, run.noises, run.states[:-1], run.states[1:], strict=True)
        )
    ]
    needed = _needed(found)
    states = max(len(each) for each in needed)
    matrices = np.zeros((len(found), states, STATES + states))
    for matrix, step, old, new in zip(matrices, found, needed[:-1], needed[1:], strict=True):
        kept = step[new][:, [*range(STATES), *(STATES + state for state in old)]]
        matrix[: kept.shape[0], : kept.shape[1]] = kept
    return matrices


def _solved(columns: Vector, wanted: Vector, mistake: str) -> Vector:
    """The matrix (new states, columns) that makes `wanted` of `columns`."""
    if not (np.isfinite(columns).all() and np.isfinite(wanted).all()):
        raise ValueError(f"{mistake}: it is not finite")
    weights = np.linalg.lstsq(columns, wanted, rcond=SAME)[0]
    if np.abs(columns @ weights - wanted).max() > LINEAR * max(1.0, np.abs(wanted).max()):
        raise ValueError(mistake)
    weights[np.abs(weights) < NOTHING * np.abs(weights).max(axis=0)] = 0.0
    return np.asarray(weights.T)


def _needed(matrices: Sequence[Vector]) -> list[list[int]]:
    """Return which states are read, before each step and after the last; the latent, 0, always."""
    needed = [[0]]
    for matrix in reversed(matrices):
        read = np.flatnonzero((matrix[needed[0], STATES:] != 0).any(axis=0))
        needed.insert(0, sorted({0, *read.tolist()}))
    return needed


def _noised(scheduler: Any, time: torch.Tensor) -> tuple[float, float]:
    """Return how much of picture and of noise the scheduler puts into a picture that it noises for `time`."""
    picture, noise = torch.eye(2).unsqueeze(1)
    if hasattr(scheduler, "scale_noise"):
        mixed = scheduler.scale_noise(picture, time.unsqueeze(0), noise)
    else:
        mixed = scheduler.add_noise(picture, noise, time.unsqueeze(0))
    of_picture, of_noise = mixed.flatten().tolist()
    return of_picture, of_noise


def _clean(prediction: str, picture: float, noise: float) -> tuple[float, float]:
    """The picture from latent and output, where the latent is `picture` times the picture and `noise` times noise."""
    match prediction:
        case "epsilon" if picture:
            return 1 / picture, -noise / picture
        case "v_prediction":
            length = picture**2 + noise**2
            return picture / length, -noise / length**0.5
        case "sample":
            return 0.0, 1.0
        case "flow_prediction":
            return 1.0, -noise
    raise ValueError(f"no picture follows from the prediction {prediction} at pure noise")


def _noise_dtype(scheduler: Any) -> torch.dtype | None:
    """DPM-Solver draws in float32, whatever the network's dtype; the others in the output's."""
    return torch.float32 if type(scheduler).__name__.startswith("DPMSolver") else None


def _scales(scheduler: Any) -> bool:
    return hasattr(scheduler, "scale_model_input")


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _vector(tensor: torch.Tensor) -> Vector:
    return np.asarray(tensor.detach().double()[0].numpy()).copy()
