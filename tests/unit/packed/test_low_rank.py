"""Sets of LoRAs: factors side by side, and where sets act on packed tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from giornata.packed.low_rank import BatchLoras, SequenceLoras, is_text_layer, low_rank


def test_loras_of_a_set_are_one_product() -> None:
    one, two = ({"m.down": torch.randn(rank, 5), "m.up": torch.randn(7, rank)} for rank in (2, 3))
    two |= {"n.down": torch.randn(1, 5), "n.up": torch.randn(4, 1)}
    two |= {"text_encoder.m.down": torch.randn(1, 5), "text_encoder.m.up": torch.randn(4, 1)}
    made = low_rank("both", [(one, 0.5), (two, 1.0)])
    assert made.modules.keys() == {"m", "n"}
    factors = made.modules["m"]
    assert factors.down.shape == (5, 5)
    wanted = 0.5 * one["m.up"] @ one["m.down"] + two["m.up"] @ two["m.down"]
    torch.testing.assert_close(factors.up @ factors.down, wanted)
    assert made.rank == 5
    assert made.size_bytes == 4 * (5 * 5 + 7 * 5 + 5 + 4)


@given(st.lists(st.tuples(st.integers(-1, 2), st.integers(0, 4)), min_size=1, max_size=8))
def test_spans_cover_the_tokens_of_sequences_with_sets_once(given: list[tuple[int, int]]) -> None:
    sets = [SequenceLoras(str(index), {}) for index in range(3)]
    owners = BatchLoras([None if which < 0 else sets[which] for which, _ in given])
    found = owners.over(tuple(length for _, length in given))
    tokens = [which for which, length in given for _ in range(length)]
    seen = [-1] * len(tokens)
    for before, after in zip(found.of, found.of[1:], strict=False):
        assert before.end <= after.start
        assert before.end < after.start or before.low_rank is not after.low_rank
    for span in found.of:
        assert span.start < span.end
        seen[span.start : span.end] = [sets.index(span.low_rank)] * (span.end - span.start)
    assert seen == tokens
    assert found.units == len(tokens)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("transformer_blocks.0.attn.add_k_proj", True),
        ("transformer_blocks.0.attn.to_add_out", True),
        ("transformer_blocks.0.ff_context.net.0.proj", True),
        ("transformer_blocks.0.txt_mlp.net.2", True),
        ("context_embedder", True),
        ("transformer_blocks.0.attn.to_k", False),
        ("transformer_blocks.0.attn.to_out.0", False),
        ("transformer_blocks.0.ff.net.0.proj", False),
        ("transformer_blocks.0.img_mlp.net.2", False),
    ],
)
def test_layers_of_text_are_known_by_name(path: str, text: bool) -> None:
    assert is_text_layer(path) is text
