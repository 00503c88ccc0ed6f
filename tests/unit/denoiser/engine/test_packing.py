"""The packed layout loses and mixes no token, and attention over it equals each sequence's alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from hypothesis import given
from hypothesis import strategies as st

from giornata.packed.attention import (
    Beside,
    DenseKV,
    choose_attention,
    choose_cross_attention,
    each_across,
    gather,
    grouped,
    varlen,
    varlen_across,
)
from giornata.packed.packing import PackedBatch, Segments, make_layout, make_region

LENGTHS = st.lists(st.tuples(st.integers(1, 7), st.integers(1, 9)), min_size=1, max_size=6)


@given(LENGTHS)
def test_joint_order_is_text_then_image_of_each_sequence(lengths: list[tuple[int, int]]) -> None:
    # Each token is (sequence, is image, position): what the layout must keep together.
    text = torch.tensor([[s, 0, p] for s, (t, _) in enumerate(lengths) for p in range(t)])
    image = torch.tensor([[s, 1, p] for s, (_, i) in enumerate(lengths) for p in range(i)])
    made = make_layout([t for t, _ in lengths], [i for _, i in lengths])
    joint = made.join(text, image)
    wanted = [
        [s, kind, p]
        for s, pair in enumerate(lengths)
        for kind, length in enumerate(pair)
        for p in range(length)
    ]
    assert joint.tolist() == wanted
    assert made.joint.sequence.tolist() == joint[:, 0].tolist()
    assert made.text.sequence.tolist() == text[:, 0].tolist()
    assert made.image.sequence.tolist() == image[:, 0].tolist()
    back_text, back_image = made.split(joint)
    assert torch.equal(back_text, text)
    assert torch.equal(back_image, image)


CELLS = st.lists(st.booleans(), min_size=2, max_size=9)


@given(st.lists(st.tuples(st.integers(1, 7), CELLS, st.booleans()), min_size=1, max_size=6))
def test_live_and_outside_tokens_are_those_of_their_regions(
    given: list[tuple[int, list[bool], bool]],
) -> None:
    made = make_layout([text for text, _, _ in given], [len(cells) for _, cells, _ in given])
    numbers = torch.arange(sum(made.joint.lengths)).float()[:, None]
    regions = tuple(make_region(torch.tensor([cells])) for _, cells, _ in given)
    sequences = PackedBatch(made, (numbers, -numbers), regions)
    joint, image, outside, joint_at, image_at = [], [], [], 0, 0
    for (text, cells, whole), part in zip(given, regions, strict=True):
        inside = [part is None or whole or cell for cell in cells]
        joint += [joint_at + token for token in range(text)]
        joint += [joint_at + text + token for token, live in enumerate(inside) if live]
        image += [image_at + token for token, live in enumerate(inside) if live]
        if part is not None:
            outside += [joint_at + text + token for token, cell in enumerate(cells) if not cell]
        joint_at, image_at = joint_at + text + len(cells), image_at + len(cells)
    live = sequences.live(tuple(whole for _, _, whole in given))
    assert live.image.tolist() == image
    assert [column.flatten().tolist() for column in live.rotary] == [joint, [-n for n in joint]]
    assert sum(live.layout.joint.lengths) == len(joint)
    masked = tuple(index for index, part in enumerate(regions) if part is not None)
    if masked:
        beyond = sequences.beyond(masked)
        assert beyond.rotary[0].flatten().tolist() == outside
        assert sum(beyond.segments.lengths) == len(outside)


@given(
    st.lists(st.tuples(st.integers(1, 7), st.integers(0, 6), CELLS, st.booleans()), min_size=1, max_size=6)
)
def test_a_batch_without_padding_has_all_other_tokens(
    given: list[tuple[int, int, list[bool], bool]],
) -> None:
    """Live and outside tokens of it are those of the whole batch."""
    made = make_layout(
        [live + padding for live, padding, _, _ in given], [len(cells) for _, _, cells, _ in given]
    )
    numbers = torch.arange(sum(made.joint.lengths)).float()[:, None]
    regions = tuple(make_region(torch.tensor([cells])) for _, _, cells, _ in given)
    padding = tuple(tokens for _, tokens, _, _ in given)
    whole = PackedBatch(made, (numbers, -numbers), regions, padding)
    left_out = tuple(s for s, (_, _, _, frozen) in enumerate(given) if frozen)
    found, lies = whole.without_padding(left_out)
    joint, text, joint_at, text_at = list[int](), list[int](), 0, 0
    for live, padded, cells, frozen in given:
        length = live if frozen else live + padded
        text += range(text_at, text_at + length)
        joint += [*range(joint_at, joint_at + length)]
        joint += [joint_at + live + padded + cell for cell in range(len(cells))]
        joint_at, text_at = joint_at + live + padded + len(cells), text_at + live + padded
    assert lies.tolist() == text
    rotary = [column.flatten().tolist() for column in found.rotary]
    assert rotary == [joint, [-n for n in joint]]
    masked = tuple(index for index, part in enumerate(regions) if part is not None)
    nothing = (False,) * len(given)
    assert found.live(nothing).image.tolist() == whole.live(nothing).image.tolist()
    if masked:
        outside = found.beyond(masked).rotary[0]
        assert outside.tolist() == whole.beyond(masked).rotary[0].tolist()


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8))
def test_segments_cover_the_packed_dimension(lengths: list[int]) -> None:
    made = Segments(tuple(lengths))
    assert made.offsets.dtype is torch.int32
    assert made.offsets.tolist() == [start for start, _ in made.bounds] + [sum(lengths)]
    assert [end - start for start, end in made.bounds] == lengths
    assert made.longest == max(lengths)
    assert made.sequence.bincount(minlength=len(lengths)).tolist() == lengths


def test_a_batch_without_sequences_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sequence"):
        Segments(())


def test_a_sequence_without_image_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one image token"):
        make_layout([2, 3], [3, 0])
    assert make_layout([2, 0], [3, 4]).joint.lengths == (5, 4), "text may be missing"


def test_unequal_numbers_of_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="1 text lengths and 2 image lengths"):
        make_layout([1], [2, 3])


def random_heads(length: int, heads: int = 2, head_dim: int = 8) -> torch.Tensor:
    return torch.randn(length, heads, head_dim, dtype=torch.float64)  # rounding in float32 is the processor's


@given(
    st.lists(
        st.tuples(st.integers(1, 7), st.integers(0, 9), st.booleans(), st.integers(0, 3)),
        min_size=1,
        max_size=6,
    )
)
def test_grouped_attention_equals_each_sequence_alone(sequences: list[tuple[int, int, bool, int]]) -> None:
    """Sequences of some own tokens and some outside, whose keys are kept with room in front of them or without.

    Some attend to others besides, which lie apart from these.
    """
    torch.manual_seed(0)
    own = Segments(tuple(tokens for tokens, _, _, _ in sequences))
    query, key, value = (random_heads(sum(own.lengths)) for _ in range(3))
    outside: dict[int, Beside] = {}
    wanted = []
    for index, (start, end) in enumerate(own.bounds):
        keys, values = key[start:end], value[start:end]
        _, beyond, room, others = sequences[index]
        apart = DenseKV(random_heads(others), random_heads(others))
        if others:
            keys, values = torch.cat((keys, apart.key)), torch.cat((values, apart.value))
            outside[index] = apart
        if beyond:
            more, free = (random_heads(beyond), random_heads(beyond)), end - start + others if room else 0
            keys, values = torch.cat((keys, more[0])), torch.cat((values, more[1]))
            roomy = [torch.cat((random_heads(free), part)) for part in more]
            kept = DenseKV(roomy[0], roomy[1], free)
            outside[index] = (kept, apart) if others else kept
        alone = F.scaled_dot_product_attention(
            query[start:end].transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1)
        )
        wanted.append(alone.transpose(0, 1))
    torch.testing.assert_close(grouped(query, key, value, own, outside), torch.cat(wanted), atol=1e-6, rtol=0)


def test_the_cpu_attends_in_groups() -> None:
    assert choose_attention(torch.device("cpu"), torch.bfloat16, gather).func is grouped


@pytest.mark.parametrize(("capability", "fast"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_lengths_are_told_to_flash_attention_from_ampere_on(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], fast: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda")
    assert choose_attention(device, torch.bfloat16, gather).func is (varlen if fast else grouped)
    assert choose_cross_attention(device, torch.float16) is (varlen_across if fast else each_across)
    assert choose_cross_attention(device, torch.float32) is each_across


def test_sequences_of_one_length_are_a_batch() -> None:
    """torch's kernel for batches is faster than the one for any lengths, which a CPU does not have at all."""
    own = Segments((6, 6), torch.device("cpu"))
    query, key, value = torch.randn(3, 12, 2, 8).unbind()
    wanted = grouped(query, key, value, own, {})
    torch.testing.assert_close(varlen(query, key, value, own, {}), wanted, atol=0, rtol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_varlen_equals_grouped_on_cuda() -> None:
    device = torch.device("cuda")
    own = Segments((5, 130, 64), device)

    def random(tokens: int) -> torch.Tensor:
        return torch.randn(tokens, 4, 64, device=device, dtype=torch.bfloat16)

    query, key, value = (random(sum(own.lengths)) for _ in range(3))
    outside = {0: DenseKV(random(4), random(4)), 2: DenseKV(random(200), random(200), room=64)}
    fast = choose_attention(device, torch.bfloat16, gather)(query, key, value, own, outside)
    torch.testing.assert_close(fast, grouped(query, key, value, own, outside), atol=2e-2, rtol=0)
