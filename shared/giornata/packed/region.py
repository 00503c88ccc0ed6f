"""The compute set: which tokens of a picture an edit computes, and which it takes from the template. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Region:
    """A partition of a picture's tokens. Indices are int64, ascending, row-major, on the engine's device."""

    computed: Tensor
    """(computed,): what the mask touches, and a halo around it."""
    outside: Tensor
    """(outside,): all others; at least one."""
    digest: bytes
    """Equal for equal partitions: rows that share one share what they take from a template."""


def region(touched: Tensor, halo: int, device: torch.device | str = "cpu") -> Region | None:
    """The region of a mask; None where there is nothing to gain: nothing is left outside of it, or nothing is touched.

    Args:
        touched: (height, width) bool, in tokens: what the model's mask touches after grow and blur.
        halo: tokens (of Chebyshev distance) around them that are computed too. FlashPS has none; it costs little and
            most of the loss of reuse lies there.
        device: of the indices.

    Raises:
        ValueError: `halo` is negative.
    """
    if halo < 0:
        raise ValueError(f"a halo has 0 tokens or more, received {halo}")
    side = 2 * halo + 1
    grown = F.max_pool2d(touched.cpu().float()[None, None], side, stride=1, padding=halo)[0, 0] > 0
    flat = grown.flatten()
    if bool(flat.all()) or not bool(flat.any()):
        return None
    return Region(
        flat.nonzero().squeeze(1).to(device),
        (~flat).nonzero().squeeze(1).to(device),
        hashlib.blake2b(flat.numpy().tobytes(), digest_size=16).digest(),
    )
