"""Noise schedules: flow matching, models trained at discrete times, and diffusers' schedulers as tables. Pure."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from giornata.component_configs import SOLVERS, sampler_of
from giornata.wire.errors import InvalidField
from giornata.wire.models import DISCRETE_TIME, FLOW_MATCHING, Sampler, evaluations
from giornata_denoiser.rows.row import STATES, SamplerTable

FLOW_SCHEDULER: Final = "FlowMatchEulerDiscreteScheduler"


def scheduler_class(name: str) -> Any:
    """A scheduler of diffusers, which is loaded with the first checkpoint."""
    import diffusers  # noqa: PLC0415 - takes seconds

    return getattr(diffusers, name)


def check_offer(sampler: Sampler, offered: Sequence[Sampler], kept: int, steps: int, strength: float) -> None:
    """Raise InvalidField where `sampler` is not `offered`, or where nothing is `kept` of so many steps."""
    if sampler not in offered:
        raise InvalidField(
            f"The model does not take the sampler {sampler}.",
            field="sampler",
            received=sampler,
            accepted=", ".join(offered),
        )
    if kept < 1:
        raise InvalidField(
            f"strength times {steps} steps leaves no step to compute.",
            field="strength",
            received=strength,
            accepted=f"at least {1 / steps:.3f}",
        )


# Models that are trained at discrete times, as SD and SDXL: the network predicts noise or velocity.
#
# Every sampler of `giornata.component_configs.SOLVERS` runs with the checkpoint's noise schedule. The noise level
# of a row is the network's own time, over the number of times it is trained at. So recordings of one
# sampler serve the others, whatever scale their latents have.


LINEAR: Final[Mapping[str, object]] = {"clip_sample": False, "thresholding": False}
"""What a configuration that does not say otherwise means; diffusers' own default of `clip_sample` is for pixels."""
PREDICTIONS: Final = ("epsilon", "v_prediction")
"""What every sampler can be run with."""
TRIED: Final = 4
"""Steps in which every sampler must prove linear with a checkpoint's configuration."""


class DiscreteTime:
    """Satisfies :class:`giornata_denoiser.families.network.NoiseSchedule`. `config` is the checkpoint's scheduler's.

    Raises:
        ValueError: a scheduler that is not served, or one that clips samples, which no matrix does.
    """

    samplers: Final = DISCRETE_TIME
    recorder: Final = Sampler.EULER
    """It evaluates the network once a level, and draws nothing."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = {**LINEAR, **config}
        self.default_sampler = sampler_of(config)
        _check_linear(self._config)
        self._made = lru_cache(maxsize=256)(self._solved)
        for sampler in self.samplers:
            self.track(sampler=sampler, steps=TRIED, strength=1.0, cells=1)

    def track(self, *, sampler: Sampler, steps: int, strength: float, cells: int) -> SamplerTable:  # noqa: ARG002 - protocol
        """The track of a row, as `StableDiffusionInpaintPipeline` and `StableDiffusionXLInpaintPipeline` make it.

        A row begins from pure noise at a strength of 1, otherwise from the noised picture.

        Raises:
            InvalidField: a sampler that is not offered, strength leaves no step to compute, or the sampler does not
                take so many steps.
        """
        kept = evaluations(Sampler.EULER, steps, strength, keeps_whole_steps=True)
        check_offer(sampler, self.samplers, kept, steps, strength)
        return self._made(sampler, steps, kept, strength == 1.0)

    def _solved(self, sampler: Sampler, steps: int, kept: int, pure: bool) -> SamplerTable:  # noqa: FBT001 - of a cache
        scheduler = self._scheduler(sampler)
        try:
            scheduler.set_timesteps(steps, device="cpu")
        except ValueError as error:
            most = scheduler.config.get("original_inference_steps")  # of LCM's distillation
            raise InvalidField(
                f"The sampler {sampler} does not take so many steps.",
                field="num_inference_steps",
                received=steps,
                accepted="fewer" if most is None else f"at most {most}",
            ) from error
        first = (steps - kept) * scheduler.order
        times = scheduler.timesteps[first:].double() / scheduler.config.num_train_timesteps
        return solve_track(
            scheduler,
            first,
            levels=torch.cat((times, times.new_zeros(1))),
            begin=float(scheduler.init_noise_sigma) if pure else None,
            prediction=scheduler.config.prediction_type,
        )

    def _scheduler(self, sampler: Sampler) -> Any:
        solver = SOLVERS[sampler]
        return scheduler_class(solver.scheduler).from_config(self._config, **solver.options)


def discrete_scheduler_config(folder: Path) -> dict[str, Any]:
    """The scheduler's configuration in a checkpoint; its class may be any."""
    config: dict[str, Any] = scheduler_class("EulerDiscreteScheduler").load_config(
        folder, subfolder="scheduler", local_files_only=True
    )
    return config


def _check_linear(config: Mapping[str, Any]) -> None:
    """Raise ValueError where a step is no sum of what it is made of."""
    for option, accepted in LINEAR.items():
        if config[option] != accepted:
            raise ValueError(f"the scheduler option {option} is not served: received {config[option]}")
    learned = str(config.get("variance_type") or "")
    if learned.startswith("learned"):
        raise ValueError(f"the scheduler option variance_type is not served: received {learned}")
    prediction = config.get("prediction_type", PREDICTIONS[0])
    if prediction not in PREDICTIONS:
        raise ValueError(
            f"the prediction type {prediction} is not served; served are: {', '.join(PREDICTIONS)}"
        )


# Flow matching: the network predicts the velocity between noise and picture, and Euler's method follows it.
#
# x(sigma) = sigma * noise + (1 - sigma) * picture. The noise level of a row is sigma.


Config: TypeAlias = Mapping[str, Any]
Spacing: TypeAlias = Callable[[Config, int, int], dict[str, Any]]
"""How a family's pipeline places its levels: arguments of the scheduler's `set_timesteps`, from the scheduler's
configuration, the number of steps and the tokens of the picture."""
LIGHTNING: Final[dict[str, Any]] = {
    "shift": 1.0,
    "use_dynamic_shifting": True,
    "time_shift_type": "exponential",
    "base_shift": math.log(3),
    "max_shift": math.log(3),
    "shift_terminal": None,
}
"""What the published Lightning LoRAs of Qwen-Image change of the scheduler: shifted by 3, whatever the size."""


class FlowMatching:
    """Satisfies :class:`giornata_denoiser.families.network.NoiseSchedule`.

    `config` is the checkpoint's scheduler configuration; `spacing` and `samplers` are the family's.
    """

    default_sampler: Final = Sampler.EULER
    recorder: Final = Sampler.EULER

    def __init__(self, config: Config, spacing: Spacing, samplers: Sequence[Sampler] = FLOW_MATCHING) -> None:
        self._config, self._spacing, self.samplers = dict(config), spacing, samplers
        self._made = lru_cache(maxsize=256)(self._solved)

    def track(self, *, sampler: Sampler, steps: int, strength: float, cells: int) -> SamplerTable:
        """The track of a row, as the family's inpainting pipeline makes it.

        Raises:
            InvalidField: a sampler that is not offered, or strength leaves no step to compute, or there is one step and
                the scheduler stretches its levels to end at `shift_terminal`, by which it would divide by 0.
        """
        kept = evaluations(sampler, steps, strength, keeps_whole_steps=False)
        if steps == 1 and self._config_of(sampler).get("shift_terminal"):
            raise InvalidField(
                "The model's noise levels take more steps.",
                field="num_inference_steps",
                received=steps,
                accepted="at least 2",
            )
        check_offer(sampler, self.samplers, kept, steps, strength)
        return self._made(sampler, steps, kept, cells)

    def _config_of(self, sampler: Sampler) -> dict[str, Any]:
        return self._config | LIGHTNING if sampler is Sampler.EULER_LIGHTNING else self._config

    def _solved(self, sampler: Sampler, steps: int, kept: int, cells: int) -> SamplerTable:
        config = self._config_of(sampler)
        scheduler = scheduler_class(FLOW_SCHEDULER).from_config(config)
        scheduler.set_timesteps(device="cpu", **self._spacing(config, steps, cells))
        first = steps - kept
        return solve_track(scheduler, first, levels=scheduler.sigmas[first:], prediction="flow_prediction")


def shifted_by_size(config: Config, steps: int, cells: int) -> dict[str, Any]:
    """Larger pictures get more noise, as Flux, Qwen-Image and Chroma have it."""
    return {"sigmas": _even(steps), "mu": calculate_shift(cells, config)}


def shifted_by_steps(config: Config, steps: int, cells: int) -> dict[str, Any]:  # noqa: ARG001 - as every spacing
    """So do larger pictures and fewer steps, as Flux.2 and Klein have it."""
    return {"sigmas": _even(steps), "mu": compute_empirical_mu(cells, steps)}


def shifted_always(config: Config, steps: int, cells: int) -> dict[str, Any]:
    """By the scheduler's own shift, as SD3 has it; by size where the scheduler asks for that, as SD3.5 may."""
    if config.get("use_dynamic_shifting"):
        return {"num_inference_steps": steps, "mu": calculate_shift(cells, config)}
    return {"num_inference_steps": steps}


def shifted_evenly(config: Config, steps: int, cells: int) -> dict[str, Any]:
    """By the scheduler's own shift, evenly before it, as Z-Image has it; by size where the scheduler asks for that."""
    return {"sigmas": torch.linspace(1.0, 1 / steps, steps).tolist(), "mu": calculate_shift(cells, config)}


def calculate_shift(image_tokens: int, config: Config) -> float:
    """`mu` of dynamic shifting: linear in the number of image tokens (`calculate_shift` of diffusers)."""
    base_tokens, max_tokens = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    base_shift, max_shift = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    return float(image_tokens * slope + (base_shift - slope * base_tokens))


def compute_empirical_mu(image_tokens: int, steps: int) -> float:
    """`mu` of Flux.2, linear in tokens and in steps (`compute_empirical_mu` of diffusers)."""
    many = 0.00016927 * image_tokens + 0.45666666  # at 200 steps
    if image_tokens > 4300:
        return float(many)
    few = 8.73809524e-05 * image_tokens + 1.89833333  # at 10 steps
    slope = (many - few) / 190.0
    return float(slope * steps + many - 200.0 * slope)


def flow_scheduler_config(folder: Path) -> dict[str, Any]:
    """The scheduler's configuration in a checkpoint.

    Raises:
        ValueError: :class:`FlowMatching` does not sample as it says.
    """
    config: dict[str, Any] = scheduler_class(FLOW_SCHEDULER).load_config(
        folder, subfolder="scheduler", local_files_only=True
    )
    kind = config.get("_class_name")
    if kind != FLOW_SCHEDULER:
        raise ValueError(f"{folder} has a {kind}; served is {FLOW_SCHEDULER}")
    for option in ("stochastic_sampling", "invert_sigmas"):
        if config.get(option):
            raise ValueError(f"{folder}: the scheduler option {option} is not served")
    return config


def _even(steps: int) -> list[float]:
    levels: list[float] = np.linspace(1.0, 1 / steps, steps).tolist()
    return levels


# A scheduler of diffusers as a table of small matrices, found by running the scheduler itself.
#
# Every sampler that is served is linear: the sample that `step` returns, and what the scheduler remembers, are sums of
# the sample, the network's output, fresh noise and what was remembered before, with numbers that depend on the step
# alone. So the scheduler runs once on unit vectors in place of pictures: the first one is the sample, another one the
# output of each step. What it holds after a step, as a combination of what it held before, is the step's matrix.


SPARE: Final = 32
"""Coordinates that no unit vector has: there, noise is not mistaken for samples or outputs."""
TOLERANCE: Final = 1e-5
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
        scaled = hasattr(scheduler, "scale_model_input")
        run.inputs.append(float(scheduler.scale_model_input(torch.ones(1), time)) if scaled else 1.0)
        run.outputs.append(_vector(units[1 + step]))
        seeded = torch.Generator().manual_seed
        dtype = _noise_dtype(scheduler) or torch.float64
        run.noises.append(_vector(torch.randn(sample.shape, generator=seeded(step), dtype=dtype)))
        drawing = {"generator": seeded(step)} if draws else {}
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
        _combination(
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


def _combination(columns: Vector, wanted: Vector, mistake: str) -> Vector:
    """The matrix (new states, columns) that makes `wanted` of `columns`."""
    if not (np.isfinite(columns).all() and np.isfinite(wanted).all()):
        raise ValueError(f"{mistake}: it is not finite")
    weights = np.linalg.lstsq(columns, wanted, rcond=SAME)[0]
    if np.abs(columns @ weights - wanted).max() > TOLERANCE * max(1.0, np.abs(wanted).max()):
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


def _vector(tensor: torch.Tensor) -> Vector:
    return np.asarray(tensor.detach().double()[0].numpy()).copy()
