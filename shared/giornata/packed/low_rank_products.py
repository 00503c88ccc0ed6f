"""Products of low-rank factors with the tokens that they act on, added to what a layer has made of these tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor, nn

from giornata.packed.low_rank import LowRankFactors


class FactorSpan(NamedTuple):
    """Factors of a module, and what they act on."""

    factors: LowRankFactors
    start: int
    end: int
    """Rows of what enters a linear layer, items of what enters a convolution."""


Products = Callable[[Tensor, Tensor, Sequence[FactorSpan]], None]
"""Adds ``up (down x)`` of each span: of what enters a linear layer, (rows, in_features), to what leaves it, (rows,
out_features), which may be some columns of more."""


def choose(device: torch.device, dtype: torch.dtype) -> Products:  # noqa: ARG001 - one implementation so far
    """The fastest implementation for tensors of `dtype` on `device`."""
    return segmented


def segmented(entering: Tensor, leaving: Tensor, parts: Sequence[FactorSpan]) -> None:
    """Two products a span; see :data:`Products`."""
    for factors, start, end in parts:
        low = entering[start:end] @ factors.down.flatten(1).t()
        leaving[start:end].addmm_(low, factors.up.flatten(1).t())


def convolve(
    entering: Tensor,
    leaving: Tensor,
    parts: Sequence[FactorSpan],
    module: nn.Conv2d,
    *,
    padding: int | None = None,
) -> None:
    """The same for the convolution `module`: (items, channels, height, width) each; its own padding or another."""
    around = module.padding if padding is None else padding
    for factors, start, end in parts:
        low = F.conv2d(entering[start:end], factors.down, None, module.stride, around, module.dilation)
        leaving[start:end] += F.conv2d(low, factors.up)
