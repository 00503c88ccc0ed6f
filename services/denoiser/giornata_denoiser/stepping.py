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
    latent = torch.cat([row.latent for row in rows])
    sigma = torch.stack([row.sigmas.sigmas[row.step] for row in rows])
    next_sigma = torch.stack([row.sigmas.sigmas[row.step + 1] for row in rows])
    timestep = torch.stack([row.sigmas.timesteps[row.step] for row in rows])
    levels = torch.stack((next_sigma - sigma, next_sigma, timestep)).to(family.device)
    velocity = _velocity(family, assembly, latent, levels[2])
    delta, next_sigma = levels[:2].index_select(1, assembly.row_of_token).unsqueeze(2)
    latent = euler_step(latent, velocity, delta)
    latent = family.after_step(latent, assembly.conditioning, next_sigma)
    return torch.split(latent, list(assembly.row_lengths))


def _velocity(family: Family, assembly: Assembly, latent: Tensor, timestep: Tensor) -> Tensor:
    """Velocity of every row, (row_tokens, channels) as `latent`; `timestep` is (rows,) float32."""
    image = family.model_input(latent, assembly.conditioning)
    guided = assembly.guided
    if guided is None:
        return family.velocity(assembly.sequences, image, timestep)
    image = torch.cat((image, image.index_select(0, guided.tokens)))
    timestep = torch.cat((timestep, timestep.index_select(0, guided.rows)))
    velocity = family.velocity(assembly.sequences, image, timestep)
    positive, negative = velocity[: len(latent)], velocity[len(latent) :]
    combined = combine_guidance(positive.index_select(0, guided.tokens), negative, guided.scale)
    return positive.index_copy(0, guided.tokens, combined)
