"""Flow matching: the network predicts the velocity between noise and picture, and Euler's method follows it.

x(sigma) = sigma * noise + (1 - sigma) * picture. The noise level of a row is sigma.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

from giornata.wire.samplers import FLOW_MATCHING, Sampler, evaluations
from giornata_denoiser.families.sampling.offers import check_offer, check_steps, check_strength
from giornata_denoiser.families.sampling.table import solved
from giornata_denoiser.rows.track import SamplerTable

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
        return solved(scheduler, first, levels=scheduler.sigmas[first:], prediction="flow_prediction")


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


def scheduler_config(folder: Path) -> dict[str, Any]:
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
