"""Tokens of pictures: patches of latents, and their positions."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from giornata.packed.compute_set import Rotary

# Tokens that are patches of 2x2 latent pixels: how a latent is packed into them, and back. Pure.
#
# Source: `_pack_latents` and `_unpack_latents` of diffusers' Flux pipelines, for one picture.


PATCH: Final = 2
"""Latent pixels a side of a token."""


def pack_patches(pixels: Tensor) -> Tensor:
    """(tokens, channels * 4) of (channels, height, width) latent pixels; tokens row by row, channels before pixels."""
    channels, height, width = pixels.shape
    patches = pixels.view(channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return patches.permute(1, 3, 0, 2, 4).reshape(-1, channels * PATCH**2)


def unpack_patches(latent: Tensor, grid: tuple[int, int]) -> Tensor:
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


# Positions of packed tokens, in the form that `giornata.packed.elementwise.rotate` takes. Pure.


def of_complex(turns: Tensor) -> Rotary:
    """Complex numbers of length 1, (tokens, head_dim / 2), one of each pair of neighbouring channels."""
    cosine, sine = (part.repeat_interleave(2, dim=1) for part in (turns.real, turns.imag))
    return cosine, sine


def numbered(tokens: int, device: torch.device, *, axis: int, axes: int, first: int = 0) -> Tensor:
    """(tokens, axes) int64: tokens that count along one axis, from `first`, and are at 0 on the others."""
    places = torch.zeros(tokens, axes, dtype=torch.long, device=device)
    places[:, axis] = torch.arange(first, first + tokens, device=device)
    return places


def cell_positions(grid: tuple[int, int], device: torch.device) -> Tensor:
    """(tokens, 2) int64: line and column of a picture's tokens, row-major."""
    lines, columns = (torch.arange(side, device=device) for side in grid)
    return torch.cartesian_prod(lines, columns)
