"""Attention over sequences of any lengths equals every sequence alone, on every device and in every dtype."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from giornata.packed import attention
from giornata.packed.attention import Attention, DenseKV, choose_attention, choose_cross_attention, grouped
from giornata.packed.packing import Segments
from tests.examples import examples

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}
"""A wrong key or value makes more than 0.1."""
SHAPES = st.lists(st.tuples(st.integers(1, 200), st.integers(0, 300), st.booleans()), min_size=1, max_size=8)
ANY_DEVICE = settings(
    examples(times=1 / 2), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@ANY_DEVICE
@given(sequences=SHAPES, heads=st.sampled_from([1, 4]), width=st.sampled_from([16, 64, 128]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["grouped", "chosen"])
def test_attention_equals_each_sequence_alone_in_float64(
    device: torch.device,
    dtype: torch.dtype,
    how: str,
    sequences: list[tuple[int, int, bool]],
    heads: int,
    width: int,
) -> None:
    attend: Attention = (
        grouped
        if how == "grouped"
        else choose_attention(device, dtype, attention.choose_elementwise(device, dtype).gather)
    )
    generator = torch.Generator().manual_seed(len(sequences))

    def random(tokens: int) -> Tensor:
        return torch.randn(tokens, heads, width, generator=generator).to(dtype)

    own = Segments(tuple(tokens for tokens, _, _ in sequences), device)
    query, key, value = (random(sum(own.lengths)) for _ in range(3))
    outside, wanted = {}, []
    for index, (start, end) in enumerate(own.bounds):
        keys, values = key[start:end], value[start:end]
        _, beyond, has_room = sequences[index]
        if beyond:
            more = random(beyond), random(beyond)
            keys, values = torch.cat((keys, more[0])), torch.cat((values, more[1]))
            kept = [torch.cat((random(end - start), part)) if has_room else part for part in more]
            room = end - start if has_room else 0
            outside[index] = DenseKV(kept[0].to(device), kept[1].to(device), room)
        asking, asked, told = (part.double().transpose(0, 1) for part in (query[start:end], keys, values))
        wanted.append(F.scaled_dot_product_attention(asking, asked, told).transpose(0, 1))
    found = attend(query.to(device), key.to(device), value.to(device), own, outside)
    torch.testing.assert_close(found.double().cpu(), torch.cat(wanted), atol=TOLERANCE[dtype], rtol=0)


@ANY_DEVICE
@given(
    sequences=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 90)), min_size=1, max_size=6),
    width=st.sampled_from([16, 40, 64]),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_across_equals_each_sequence_alone_in_float64(
    device: torch.device, dtype: torch.dtype, sequences: list[tuple[int, int]], width: int
) -> None:
    generator = torch.Generator().manual_seed(len(sequences))

    def random(tokens: int) -> Tensor:
        return torch.randn(tokens, 2, width, generator=generator).to(dtype)

    asked = [random(tokens) for tokens, _ in sequences]
    keys, values = ([random(tokens) for _, tokens in sequences] for _ in range(2))
    wanted = []
    for parts in zip(asked, keys, values, strict=True):
        query, key, value = (part.double().transpose(0, 1) for part in parts)
        wanted.append(F.scaled_dot_product_attention(query, key, value).transpose(0, 1))
    queries = Segments(tuple(map(len, asked)), device)
    found = choose_cross_attention(device, dtype)(
        torch.cat(asked).to(device),
        [key.to(device) for key in keys],
        [value.to(device) for value in values],
        queries,
    )
    torch.testing.assert_close(found.double().cpu(), torch.cat(wanted), atol=TOLERANCE[dtype], rtol=0)
