"""Tokens that are patches of 2x2 latent pixels: how a latent is packed into them, and back. Pure.

Source: `_pack_latents` and `_unpack_latents` of diffusers' Flux pipelines, for one picture.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

PATCH: Final = 2
"""Latent pixels a side of a token."""


def packed(pixels: Tensor) -> Tensor:
    """(tokens, channels * 4) of (channels, height, width) latent pixels; tokens row by row, channels before pixels."""
    channels, height, width = pixels.shape
    patches = pixels.view(channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return patches.permute(1, 3, 0, 2, 4).reshape(-1, channels * PATCH**2)


def unpacked(latent: Tensor, grid: tuple[int, int]) -> Tensor:
    """The inverse of :func:`packed`; `grid` is the picture's height and width in tokens."""
    height, width = grid
    patches = latent.view(height, width, -1, PATCH, PATCH).permute(2, 0, 3, 1, 4)
    return patches.reshape(-1, height * PATCH, width * PATCH)


def by_channel(patches: Tensor) -> Tensor:
    """(tokens, pixels and their channels) as latents are packed: (tokens, channels and their pixels)."""
    tokens, width = patches.shape
    return patches.view(tokens, PATCH**2, width // PATCH**2).transpose(1, 2).flatten(1)


def by_pixel(patches: Tensor) -> Tensor:
    """The inverse of :func:`by_channel`."""
    tokens, width = patches.shape
    return patches.view(tokens, width // PATCH**2, PATCH**2).transpose(1, 2).flatten(1)
