"""Positions of packed tokens, in the form that :func:`giornata.packed.elementwise.rotate` takes. Pure."""

from __future__ import annotations

import torch
from torch import Tensor

from giornata.packed.region import Rotary


def of_complex(turns: Tensor) -> Rotary:
    """Complex numbers of length 1, (tokens, head_dim / 2), one of each pair of neighbouring channels."""
    cosine, sine = (part.repeat_interleave(2, dim=1) for part in (turns.real, turns.imag))
    return cosine, sine


def numbered(tokens: int, device: torch.device, *, axis: int, axes: int, first: int = 0) -> Tensor:
    """(tokens, axes) int64: tokens that count along one axis, from `first`, and are at 0 on the others."""
    places = torch.zeros(tokens, axes, dtype=torch.long, device=device)
    places[:, axis] = torch.arange(first, first + tokens, device=device)
    return places


def cells(grid: tuple[int, int], device: torch.device) -> Tensor:
    """(tokens, 2) int64: line and column of a picture's tokens, row-major."""
    lines, columns = (torch.arange(side, device=device) for side in grid)
    return torch.cartesian_prod(lines, columns)
