"""Low-rank products of any spans equal those of each span alone in float64, on every device and in every dtype."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from giornata.packed.low_rank import FactorSpan, LowRankFactors, add_products, convolve
from tests.examples import examples

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Tolerance of values of about 1; a wrong span or factor makes more than 0.3."""
SPANS = st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0, 1, 4, 16])), min_size=1, max_size=6)
"""Lengths and ranks; rank 0 for nothing that acts."""


@settings(
    examples(times=1 / 2), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(spans=SPANS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_equal_each_span_alone_in_float64(
    device: torch.device, dtype: torch.dtype, spans: list[tuple[int, int]]
) -> None:
    generator = torch.Generator().manual_seed(len(spans))

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    bounds = list(pairwise(accumulate((length for length, _ in spans), initial=0)))
    entering, leaving = random(bounds[-1][1], 32), random(bounds[-1][1], 24)
    wanted, parts = leaving.double(), []
    for (start, end), (_, rank) in zip(bounds, spans, strict=True):
        if rank:
            factors = LowRankFactors(random(rank, 32) / 32**0.5, random(24, rank) / rank**0.5)
            wanted[start:end] += (
                entering[start:end].double() @ (factors.up.double() @ factors.down.double()).t()
            )
            parts.append(FactorSpan(LowRankFactors(*(part.to(device) for part in factors)), start, end))
    beside = random(bounds[-1][1], 8)
    both = torch.cat((leaving, beside), 1).to(device)  # some columns of more, as joined projections are
    add_products(entering.to(device), both[:, :24], parts)
    torch.testing.assert_close(both[:, :24].double().cpu(), wanted, atol=TOLERANCE[dtype], rtol=0)
    assert torch.equal(both[:, 24:].cpu(), beside)


@pytest.mark.parametrize("stride", [1, 2])
def test_convolutions_equal_those_of_the_changed_weight(device: torch.device, stride: int) -> None:
    torch.manual_seed(0)
    module = torch.nn.Conv2d(6, 5, 3, stride, padding=1).requires_grad_(requires_grad=False)
    factors = LowRankFactors(torch.randn(2, 6, 3, 3) / 7, torch.randn(5, 2, 1, 1))
    entering = torch.randn(3, 6, 8, 8)
    leaving = module(entering)
    wanted = leaving.clone()
    change = torch.einsum("or,rihw->oihw", factors.up.flatten(1), factors.down)
    wanted[1:] = torch.nn.functional.conv2d(
        entering[1:], module.weight + change, module.bias, stride, padding=1
    )
    found = leaving.to(device)
    parts = [FactorSpan(LowRankFactors(*(part.to(device) for part in factors)), 1, 3)]
    convolve(entering.to(device), found, parts, module)
    torch.testing.assert_close(found.cpu(), wanted, atol=1e-3, rtol=0)
