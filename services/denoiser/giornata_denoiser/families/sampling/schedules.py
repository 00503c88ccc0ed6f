"""Noise schedules: flow matching, and models that are trained at discrete times. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import diffusers
import numpy as np
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

from giornata.schedulers import SOLVERS, sampler_of
from giornata.wire.errors import InvalidField
from giornata.wire.models import DISCRETE_TIME, FLOW_MATCHING, Sampler, evaluations
from giornata_denoiser.families.sampling.table import solve_track
from giornata_denoiser.rows.row import SamplerTable

# What a schedule refuses of a request.


def check_offer(sampler: Sampler, offered: Sequence[Sampler]) -> None:
    """Raise InvalidField where `sampler` is not `offered`."""
    if sampler not in offered:
        raise InvalidField(
            f"The model does not take the sampler {sampler}.",
            field="sampler",
            received=sampler,
            accepted=", ".join(offered),
        )


def check_steps(steps: int, least: int) -> None:
    """Raise InvalidField where `steps` are fewer than a schedule is made of."""
    if steps < least:
        raise InvalidField(
            "The model's noise levels take more steps.",
            field="num_inference_steps",
            received=steps,
            accepted=f"at least {least}",
        )


def check_strength(kept: int, steps: int, strength: float) -> None:
    """Raise InvalidField where nothing is `kept` of so many steps."""
    if kept < 1:
        raise InvalidField(
            f"strength times {steps} steps leaves no step to compute.",
            field="strength",
            received=strength,
            accepted=f"at least {1 / steps:.3f}",
        )


# Models that are trained at discrete times, as SD and SDXL: the network predicts noise or velocity.
#
# Every sampler of `giornata.schedulers.SOLVERS` runs with the checkpoint's noise schedule. The noise level
# of a row is the network's own time, over the number of times it is trained at. So recordings of one
# sampler serve the others, whatever scale their latents have.


LINEAR: Final[Mapping[str, object]] = {"clip_sample": False, "thresholding": False}
"""What a configuration that does not say otherwise means; diffusers' own default of `clip_sample` is for pixels."""
PREDICTIONS: Final = ("epsilon", "v_prediction")
"""What every sampler can be run with."""
TRIED: Final = 4
"""Steps in which every sampler must prove linear with a checkpoint's configuration."""


class DiscreteTime:
    """Satisfies :class:`giornata_denoiser.families.protocol.NoiseSchedule`. `config` is the checkpoint's scheduler's.

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
        check_offer(sampler, self.samplers)
        kept = evaluations(Sampler.EULER, steps, strength, keeps_whole_steps=True)
        check_strength(kept, steps, strength)
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
        return getattr(diffusers, solver.scheduler).from_config(self._config, **solver.options)


def discrete_scheduler_config(folder: Path) -> dict[str, Any]:
    """The scheduler's configuration in a checkpoint; its class may be any."""
    config: dict[str, Any] = diffusers.EulerDiscreteScheduler.load_config(
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
    """Satisfies :class:`giornata_denoiser.families.protocol.NoiseSchedule`.

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
        check_offer(sampler, self.samplers)
        check_steps(steps, 2 if self._config_of(sampler).get("shift_terminal") else 1)
        kept = evaluations(sampler, steps, strength, keeps_whole_steps=False)
        check_strength(kept, steps, strength)
        return self._made(sampler, steps, kept, cells)

    def _config_of(self, sampler: Sampler) -> dict[str, Any]:
        return self._config | LIGHTNING if sampler is Sampler.EULER_LIGHTNING else self._config

    def _solved(self, sampler: Sampler, steps: int, kept: int, cells: int) -> SamplerTable:
        config = self._config_of(sampler)
        scheduler: Any = FlowMatchEulerDiscreteScheduler.from_config(config)
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
    served = FlowMatchEulerDiscreteScheduler
    config: dict[str, Any] = served.load_config(folder, subfolder="scheduler", local_files_only=True)
    kind = config.get("_class_name")
    if kind != served.__name__:
        raise ValueError(f"{folder} has a {kind}; served is {served.__name__}")
    for option in ("stochastic_sampling", "invert_sigmas"):
        if config.get(option):
            raise ValueError(f"{folder}: the scheduler option {option} is not served")
    return config


def _even(steps: int) -> list[float]:
    levels: list[float] = np.linspace(1.0, 1 / steps, steps).tolist()
    return levels
