"""Compute sets of masks, for tests and benchmarks that have no inspection."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor


def grown(touched: Tensor, halo: int) -> Tensor:
    """(height, width) bool: the tokens `touched`, and all within `halo` tokens of them (Chebyshev distance)."""
    side = 2 * halo + 1
    return F.max_pool2d(touched.cpu().to(torch.float32)[None, None], side, stride=1, padding=halo)[0, 0] > 0
