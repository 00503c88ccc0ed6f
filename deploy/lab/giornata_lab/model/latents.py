"""Pictures and masks as the transformer's tokens, in the order of `FluxFillPipeline`. Pure."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL

from giornata_lab.model.architecture import VAE_SCALE_FACTOR


def pack(latents: torch.Tensor) -> torch.Tensor:
    """(rows, channels, height, width) → (rows, height/2 * width/2, 4 channels)."""
    rows, channels, height, width = latents.shape
    patches = latents.view(rows, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(rows, (height // 2) * (width // 2), channels * 4)


def pack_mask(masks: torch.Tensor) -> torch.Tensor:
    """(rows, height, width) of 0 and 1 → (rows, tokens, 64): a token's 8x8 pixels."""
    rows, height, width = masks.shape
    f = VAE_SCALE_FACTOR
    pixels = masks.view(rows, height // f, f, width // f, f).permute(0, 2, 4, 1, 3)
    return pack(pixels.reshape(rows, f * f, height // f, width // f).contiguous())


@torch.no_grad()
def encode(vae: AutoencoderKL, pictures: torch.Tensor) -> torch.Tensor:
    """(rows, 3, height, width) in [-1, 1] → normalised latents, the mode of the posterior."""
    latents: torch.Tensor = vae.encode(
        pictures.contiguous(memory_format=torch.channels_last)
    ).latent_dist.mode()
    normalised: torch.Tensor = (latents - vae.config.shift_factor) * vae.config.scaling_factor
    return normalised


@torch.no_grad()
def decode(vae: AutoencoderKL, latents: torch.Tensor) -> torch.Tensor:
    """The inverse of `encode`, clamped to [-1, 1]."""
    pictures: torch.Tensor = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor).sample
    return pictures.clamp(-1, 1)


def positions(side_tokens: int, row: int = 0, column: int = 0) -> torch.Tensor:
    """(tokens, 3) ids of a square grid whose first token is at (row, column)."""
    grid = torch.zeros(side_tokens, side_tokens, 3)
    grid[..., 1] = torch.arange(side_tokens)[:, None] + row
    grid[..., 2] = torch.arange(side_tokens)[None] + column
    return grid.reshape(-1, 3)
