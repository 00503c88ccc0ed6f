"""Stored keys and values beside a sequence's own: the kernel against the twin, and both against a plain sum."""

from __future__ import annotations

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from giornata.packed.attention import (
    DenseKV,
    ElementwiseOps,
    KVPages,
    QuantisedTensor,
    beside,
    gather,
    grouped,
)
from giornata.packed.packing import Segments
from giornata_denoiser.rows.template import StoredTensor, store
from tests.examples import examples
from tests.unit.packed.test_elementwise import DEVICE, assert_alike, random, triton_kernels

kernels = triton_kernels

HEADS, WIDTH = 2, 6
BITS = st.sampled_from([0, 8, 4])


def levels(tokens: int, bits: int, dtype: torch.dtype, seed: int) -> tuple[QuantisedTensor, Tensor]:
    """Stored tokens, and their values in float64."""
    stored: StoredTensor = store(random((tokens, HEADS * WIDTH), dtype, seed), bits)
    if stored.scale is None or stored.low is None:
        return QuantisedTensor(*stored.tensors), stored.data.double()
    packed = stored.data if bits == 8 else torch.cat((stored.data & 15, stored.data >> 4), dim=1)
    return QuantisedTensor(*stored.tensors), packed.double() * stored.scale.double() + stored.low.double()


@examples(times=1 / 3)  # interpreted kernels are slow
@given(
    own=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    kinds=st.lists(
        st.tuples(st.integers(1, 5), BITS, BITS, st.booleans(), st.booleans()), min_size=3, max_size=3
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_own_and_stored_tokens_lie_side_by_side(
    kernels: ElementwiseOps,
    own: list[int],
    kinds: list[tuple[int, int, int, bool, bool]],
    dtype: torch.dtype,
    seed: int,
) -> None:
    segments = Segments(tuple(own), DEVICE)
    packed_heads = random((sum(own), 3 * HEADS * WIDTH), dtype, seed).chunk(3, dim=1)
    query, key, value = (part.view(-1, HEADS, WIDTH) for part in packed_heads)
    outside: dict[int, DenseKV | KVPages] = {}
    wanted: list[list[Tensor]] = [[], []]
    for sequence, (start, end) in enumerate(segments.bounds):
        beyond, bits, delta_bits, corrected, stored = kinds[sequence]
        index = torch.randperm(7, generator=torch.Generator().manual_seed(seed + sequence))[:beyond].to(
            DEVICE
        )
        parts, deltas, sums = [], [], []
        for number in range(2):
            kept, values = levels(7, bits, dtype, seed + 10 * sequence + number)
            delta, added = levels(beyond, delta_bits, dtype, seed + 10 * sequence + number + 5)
            parts.append(kept)
            deltas.append(delta if corrected else None)
            sums.append(values[index] + (added if corrected else 0.0))
        rows = [each.view(-1, HEADS, WIDTH) for each in sums]
        if stored:
            outside[sequence] = KVPages(index, parts[0], parts[1], deltas[0], deltas[1])
        elif beyond > 1:
            outside[sequence] = DenseKV(rows[0].to(dtype), rows[1].to(dtype))
        for whole, packed, more in zip(wanted, (key, value), rows, strict=True):
            whole.append(packed[start:end].double())
            if sequence in outside:
                whole.append(more)
    for gathers in (gather, kernels.gather):
        keys, values, spans = beside(key, value, segments, outside, gathers)
        for found, parts_of in ((keys, wanted[0]), (values, wanted[1])):
            assert_alike(found, torch.cat(parts_of).to(dtype), terms=2)
        attended = grouped(query, key, value, segments, outside, gather=gathers)
        for (start, end), (first, last) in zip(segments.bounds, spans.bounds, strict=True):
            scores = query[start:end].double().transpose(0, 1) @ keys[first:last].double().permute(1, 2, 0)
            plain = (scores / WIDTH**0.5).softmax(-1) @ values[first:last].double().transpose(0, 1)
            assert_alike(attended[start:end], plain.transpose(0, 1).to(dtype), terms=4)


@examples(times=1 / 3)  # likewise
@given(
    own=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    kinds=st.lists(st.tuples(st.integers(1, 5), BITS, st.booleans()), min_size=2, max_size=3),
    roomy=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
@example(
    own=[2, 3],
    kinds=[(4, 0, True), (5, 0, False), (3, 0, True)],
    roomy=True,
    dtype=torch.float32,
    seed=0,
)
def test_a_sequence_attends_to_several_others(
    kernels: ElementwiseOps,
    own: list[int],
    kinds: list[tuple[int, int, bool]],
    roomy: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """The last one, to stored tokens, to others as they were, or to both; the first of these may have room in front."""
    segments = Segments(tuple(own), DEVICE)
    key, value = (random((sum(own), HEADS * WIDTH), dtype, seed + n).view(-1, HEADS, WIDTH) for n in range(2))
    parts, wanted = list[DenseKV | KVPages](), [[key.double()], [value.double()]]
    for number, (tokens, bits, stored) in enumerate(kinds):
        made = [levels(tokens, bits, dtype, seed + 5 * number + n) for n in range(2)]
        rows = [values.view(-1, HEADS, WIDTH) for _, values in made]
        if stored:
            parts.append(KVPages(torch.arange(tokens, device=DEVICE), made[0][0], made[1][0]))
        else:
            room = sum(own) + sum(tokens for tokens, _, _ in kinds) if roomy else 0
            in_front = torch.full((room, HEADS, WIDTH), torch.nan, dtype=dtype, device=DEVICE)
            room_key, room_value = (torch.cat((in_front, each.to(dtype))) for each in rows)
            parts.append(DenseKV(room_key, room_value, room))
            roomy = False
        for whole, more in zip(wanted, rows, strict=True):
            whole.append(more)
    for gathers in (gather, kernels.gather):
        keys, values, spans = beside(key, value, segments, {len(own) - 1: tuple(parts)}, gathers)
        for found, parts_of in ((keys, wanted[0]), (values, wanted[1])):
            assert_alike(found, torch.cat(parts_of).to(dtype), terms=2)
        assert spans.lengths == (*own[:-1], own[-1] + sum(tokens for tokens, _, _ in kinds))
