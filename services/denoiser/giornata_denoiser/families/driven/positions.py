"""Positions of packed tokens, in the form that :func:`giornata.packed.elementwise.rotate` takes. Pure."""

from __future__ import annotations

import torch
from torch import Tensor

from giornata.packed.region import Rotary


def of_complex(turns: Tensor) -> Rotary:
    """Complex numbers of length 1, (tokens, head_dim / 2), one of each pair of neighbouring channels."""
    cosine, sine = (part.repeat_interleave(2, dim=1) for part in (turns.real, turns.imag))
    return cosine, sine


def cells(grid: tuple[int, int], device: torch.device) -> Tensor:
    """(tokens, 2) int64: line and column of a picture's tokens, row-major."""
    lines, columns = (torch.arange(side, device=device) for side in grid)
    return torch.cartesian_prod(lines, columns)
