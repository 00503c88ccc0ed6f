"""One denoising step of a whole batch: forward, guidance, Euler, and what the family does after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from giornata_denoiser.assembly import Assembly
from giornata_denoiser.families.protocol import Family
from giornata_denoiser.row import Row
from giornata_denoiser.sigmas import combine_guidance, euler_step


class Stepped(NamedTuple):
    """What a step made of the rows, one of each a row."""

    latents: tuple[Tensor, ...]
    """(tokens, 4 * latent_channels) each, after the step."""
    clean: tuple[Tensor | None, ...]
    """Likewise, of the picture that the step predicts as the end; None for rows that are not shown after it."""


def denoise_step(family: Family, assembly: Assembly, rows: Sequence[Row]) -> Stepped:
    """Every row's latent after its next step.

    Args:
        family: the checkpoint's.
        assembly: of the same rows, in the same order.
        rows: none of them done.
    """
    sigma = torch.stack([row.sigmas.sigmas[row.step] for row in rows])
    next_sigma = torch.stack([row.sigmas.sigmas[row.step + 1] for row in rows])
    timestep = torch.stack([row.sigmas.timesteps[row.step] for row in rows])
    levels = torch.stack((next_sigma - sigma, next_sigma, timestep)).to(family.device)
    delta, next_sigma, timestep = levels
    latent = torch.cat([row.latent for row in rows])
    image = family.model_input(latent, [row.conditioning for row in rows])
    velocity = _velocity(family, assembly, image, timestep)
    stepped = euler_step(latent, velocity, delta.index_select(0, assembly.row_of_token).unsqueeze(1))
    parts = torch.split(stepped, list(assembly.row_lengths))
    latents = tuple(
        family.after_step(part, row.conditioning, reached)
        for part, row, reached in zip(parts, rows, torch.split(next_sigma, 1), strict=True)
    )
    velocities = torch.split(velocity, list(assembly.row_lengths))
    clean = tuple(
        None if row.next_preview is None else _clean(family, row, part, level)
        for row, part, level in zip(rows, velocities, torch.split(sigma, 1), strict=True)
    )
    return Stepped(latents, clean)


def _clean(family: Family, row: Row, velocity: Tensor, sigma: Tensor) -> Tensor:
    """x0 = x - sigma * v, as the family leaves a latent after its last step: outside the mask, the template."""
    sigma = sigma.to(velocity.device)
    clean = euler_step(row.latent, velocity, -sigma.unsqueeze(1))
    return family.after_step(clean, row.conditioning, torch.zeros_like(sigma))


def _velocity(family: Family, assembly: Assembly, image: Tensor, timestep: Tensor) -> Tensor:
    """Velocity of every row, (row_tokens, channels).

    Args:
        family: the checkpoint's.
        assembly: of the batch.
        image: (row_tokens, in_channels), packed by row.
        timestep: (rows,) float32.
    """
    guided = assembly.guided
    if guided is None:
        return family.velocity(assembly.sequences, image, timestep)
    row_tokens = len(image)
    image = torch.cat((image, image.index_select(0, guided.tokens)))
    timestep = torch.cat((timestep, timestep.index_select(0, guided.rows)))
    velocity = family.velocity(assembly.sequences, image, timestep)
    positive, negative = torch.split(velocity, [row_tokens, len(guided.tokens)])
    combined = combine_guidance(positive.index_select(0, guided.tokens), negative, guided.scale)
    return positive.index_copy(0, guided.tokens, combined)
