"""One denoising step of a whole batch: forward, guidance, Euler, and what the family does after it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from giornata_denoiser.assembly import Assembly
from giornata_denoiser.families.protocol import Family
from giornata_denoiser.row import Row
from giornata_denoiser.sigmas import combine_guidance, euler_step


def denoise_step(family: Family, assembly: Assembly, rows: Sequence[Row]) -> tuple[Tensor, ...]:
    """Every row's latent after its next step.

    Args:
        family: the checkpoint's.
        assembly: of the same rows, in the same order.
        rows: none of them done.

    Returns:
        One (tokens, 4 * latent_channels) tensor per row.
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
    return tuple(
        family.after_step(part, row.conditioning, reached)
        for part, row, reached in zip(parts, rows, torch.split(next_sigma, 1), strict=True)
    )


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
