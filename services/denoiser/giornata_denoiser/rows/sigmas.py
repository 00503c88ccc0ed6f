"""Noise levels and the rule of one step, as diffusers' `FlowMatchEulerDiscreteScheduler` has them.

Flow matching: x(sigma) = sigma * noise + (1 - sigma) * image, and the transformer predicts the velocity
dx / dsigma = noise - image. A scheduler object exists only while a row's grid is made; stepping is vectorised
over the packed tokens of all rows. Dtypes and order of arithmetic are diffusers': it is equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from giornata.wire.errors import InvalidField

TRAIN_TIMESTEPS = 1000
"""Timestep = sigma * this; the transformers are trained with it."""


@dataclass(frozen=True, eq=False)
class SigmaGrid:
    """The noise levels of one row, on the CPU, from its first step to its last."""

    sigmas: Tensor
    """(steps + 1,) float32, falling to 0."""
    timesteps: Tensor
    """(steps,) float32, sigma * 1000."""

    @property
    def steps(self) -> int:
        """Steps that are computed."""
        return len(self.timesteps)


def sigma_grid(config: Mapping[str, Any], *, steps: int, strength: float, image_tokens: int) -> SigmaGrid:
    """The grid of a row, as `FluxInpaintPipeline` and `FluxFillPipeline` make it.

    Args:
        config: the checkpoint's scheduler configuration.
        steps: `num_inference_steps`, before `strength` drops the first ones.
        strength: 0 < strength <= 1.
        image_tokens: tokens of the whole picture; larger pictures get more noise (dynamic shifting).

    Raises:
        InvalidField: strength leaves no step to compute.
    """
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(dict(config))
    mu = calculate_shift(image_tokens, config)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps).tolist(), device="cpu", mu=mu)
    first = first_step(steps, strength)
    if first >= steps:
        raise InvalidField(
            f"strength times {steps} steps leaves no step to compute.",
            field="strength",
            received=strength,
            accepted=f"at least {1 / steps:.3f}",
        )
    return SigmaGrid(scheduler.sigmas[first:].clone(), scheduler.timesteps[first:].clone())


def calculate_shift(image_tokens: int, config: Mapping[str, Any]) -> float:
    """`mu` of dynamic shifting: linear in the number of image tokens (`calculate_shift` of diffusers)."""
    base_tokens, max_tokens = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    base_shift, max_shift = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    return float(image_tokens * slope + (base_shift - slope * base_tokens))


def first_step(steps: int, strength: float) -> int:
    """Index of the first step that is computed (`get_timesteps` of diffusers)."""
    return int(max(steps - min(steps * strength, steps), 0))


def scale_noise(image: Tensor, sigma: Tensor, noise: Tensor) -> Tensor:
    """`image` with the noise of level `sigma`.

    Args:
        image: (tokens, channels).
        sigma: (tokens, 1) or (1,), of any float dtype; taken in the dtype of `image`, as diffusers does.
        noise: as `image`.
    """
    sigma = sigma.to(image.dtype)
    return sigma * noise + (1.0 - sigma) * image


def euler_step(latent: Tensor, velocity: Tensor, delta: Tensor) -> Tensor:
    """Return x + (sigma[i+1] - sigma[i]) * v, summed in float32, in the dtype of `velocity`.

    Args:
        latent: (tokens, channels), packed by row.
        velocity: as `latent`; the product is in its dtype, as in diffusers.
        delta: (tokens, 1) float32, sigma[i+1] - sigma[i] of each token's row.
    """
    change = delta.to(velocity.dtype) * velocity
    return (latent.float() + change).to(velocity.dtype)


def blend(latent: Tensor, image: Tensor, noise: Tensor, mask: Tensor, next_sigma: Tensor) -> Tensor:
    """Put the template, noised to the next level, where the mask is 0; at the last step the template itself.

    As `FluxInpaintPipeline` does after each step. Noise of level 0 is none: the last step is no special case.

    Args:
        latent: (tokens, channels), the result of the step.
        image: the template's latents, as `latent`.
        noise: the row's noise, as `latent`.
        mask: as `latent`, 1 where the picture is repainted.
        next_sigma: (tokens, 1) or (1,) float32, noise level after this step.
    """
    return (1 - mask) * scale_noise(image, next_sigma, noise) + mask * latent


def combine_guidance(positive: Tensor, negative: Tensor, scale: Tensor) -> Tensor:
    """Classifier-free guidance, negative + scale * (positive - negative).

    Args:
        positive: (tokens, channels) velocity with the prompt.
        negative: as `positive`, with the negative prompt.
        scale: (tokens, 1) float32, `true_cfg_scale` of each token's row.
    """
    return negative + (scale * (positive - negative).float()).to(positive.dtype)
