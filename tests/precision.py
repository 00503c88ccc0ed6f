"""How far a float32 result may be from the exact one: measured where the test runs, for it depends on the processor.

Rounding differs between processors and between builds of torch, because sums are grouped otherwise. Tests therefore
compare in float64, where rounding is far below every tolerance. Where float32 itself is tested, its error is bounded
by the error that a reference, for instance diffusers, makes in float32 on the same processor.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

MARGIN: Final = 4.0
"""Two correct float32 computations may group their sums differently; their largest errors differ by less."""


def float32_bound(reference: Tensor, exact: Tensor) -> float:
    """Largest error to accept of a float32 result: `MARGIN` times that of a float32 reference.

    Args:
        reference: the reference's result, computed in float32.
        exact: the same in float64; any shape, equal to that of `reference`.
    """
    assert (reference.dtype, exact.dtype) == (torch.float32, torch.float64)
    rounding = torch.finfo(torch.float32).eps * exact.abs().max()  # the reference may be lucky
    return MARGIN * float(torch.maximum((reference.double() - exact).abs().max(), rounding))
