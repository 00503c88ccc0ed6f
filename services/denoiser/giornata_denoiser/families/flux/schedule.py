"""Noise levels and the rule of one step, as diffusers' `FlowMatchEulerDiscreteScheduler` has them.

Flow matching: x(sigma) = sigma * noise + (1 - sigma) * image, and the network predicts the velocity
dx / dsigma = noise - image. Dtypes and order of arithmetic are diffusers': every rule is equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from giornata.wire.errors import InvalidField
from giornata_denoiser.rows.row import Track

TRAIN_TIMESTEPS: Final = 1000
"""Timestep = sigma * this; the transformers are trained with it."""


class FlowMatching:
    """Euler steps along a rectified flow; satisfies :class:`giornata_denoiser.families.protocol.Schedule`.

    A row has one number at each level: sigma. `config` is the checkpoint's scheduler configuration.
    """

    memory: Final = 0

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = dict(config)

    def track(self, *, steps: int, strength: float, cells: int) -> Track:
        """The track of a row, as `FluxInpaintPipeline` and `FluxFillPipeline` make it.

        Larger pictures get more noise (dynamic shifting). A scheduler object exists only while a track is made.

        Raises:
            InvalidField: strength leaves no step to compute.
        """
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(self._config)
        mu = calculate_shift(cells, self._config)
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps).tolist(), device="cpu", mu=mu)
        first = int(max(steps - min(steps * strength, steps), 0))  # `get_timesteps` of diffusers
        if first >= steps:
            raise InvalidField(
                f"strength times {steps} steps leaves no step to compute.",
                field="strength",
                received=strength,
                accepted=f"at least {1 / steps:.3f}",
            )
        sigmas = scheduler.sigmas[first:].clone()
        return Track(scheduler.timesteps[first:].clone(), sigmas, sigmas.unsqueeze(1))

    def scaled(self, latent: Tensor, now: Tensor) -> Tensor:  # noqa: ARG002 - protocol
        """The latent itself."""
        return latent

    def step(
        self, latent: Tensor, output: Tensor, memory: tuple[Tensor, ...], now: Tensor, then: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x + (sigma[i+1] - sigma[i]) * v; nothing is remembered."""
        return euler_step(latent, output, then - now), memory

    def initial(self, noise: Tensor, at: Tensor) -> Tensor:  # noqa: ARG002 - protocol
        """The noise itself, as `FluxPipeline` begins."""
        return noise

    def noised(self, picture: Tensor, noise: Tensor, at: Tensor) -> Tensor:
        """The straight line between picture and noise, which the flow follows where nothing is repainted.

        `at` is (1,) or (tokens, 1), of any float dtype: taken in the dtype of `picture`, as diffusers does.
        """
        sigma = at.to(picture.dtype)
        return sigma * noise + (1.0 - sigma) * picture

    def clean(self, latent: Tensor, output: Tensor, now: Tensor) -> Tensor:
        """x0 = x - sigma * v."""
        return euler_step(latent, output, -now)


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


def calculate_shift(image_tokens: int, config: Mapping[str, Any]) -> float:
    """`mu` of dynamic shifting: linear in the number of image tokens (`calculate_shift` of diffusers)."""
    base_tokens, max_tokens = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    base_shift, max_shift = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    return float(image_tokens * slope + (base_shift - slope * base_tokens))


def euler_step(latent: Tensor, velocity: Tensor, delta: Tensor) -> Tensor:
    """Return x + delta * v: the product in the dtype of `velocity`, as the result, and the sum in float32.

    `latent` and `velocity` are (tokens, channels); `delta`, (tokens, 1) or (1,), is how far the noise level moves.
    """
    change = delta.to(velocity.dtype) * velocity
    return (latent.float() + change).to(velocity.dtype)
