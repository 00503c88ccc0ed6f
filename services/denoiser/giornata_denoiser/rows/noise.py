"""Noise that edits of one template share, so that what its run left behind fits all of them."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from giornata.packed.region import Region

SEED: Final = 0
KEPT: Final = 8
"""Sizes whose noise is kept: 1 MiB for 1024x1024 pixels of Flux."""


@lru_cache(maxsize=KEPT)
def template_noise(tokens: int, channels: int) -> Tensor:
    """(tokens, channels) float32 on the CPU, always the same: what a template run begins with. Not to be changed."""
    return torch.randn(tokens, channels, generator=torch.Generator("cpu").manual_seed(SEED))


def shared_noise(own: Tensor, where: Region) -> Tensor:
    """A row's noise: its own (tokens, channels) in its region, the template's outside of it."""
    noise = template_noise(*own.shape).to(own.device, own.dtype, copy=True)
    noise[where.computed] = own[where.computed]
    return noise
