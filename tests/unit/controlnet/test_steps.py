"""Which waiting steps share a forward."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata_controlnet.steps import sharing


@pytest.mark.parametrize(
    ("tokens", "limit", "count"),
    [([], 10, 0), ([4, 4, 4], 10, 2), ([4, 4, 4], 12, 3), ([30, 1], 10, 1), ([4, 30, 1], 10, 1)],
)
def test_steps_share_a_forward_up_to_a_limit_and_in_their_order(
    tokens: list[int], limit: int, count: int
) -> None:
    assert sharing(tokens, limit) == count


@given(st.lists(st.integers(1, 20), min_size=1), st.integers(1, 40))
def test_every_forward_takes_a_step_and_as_many_as_fit(tokens: list[int], limit: int) -> None:
    count = sharing(tokens, limit)
    assert 1 <= count <= len(tokens)
    assert count == 1 or sum(tokens[:count]) <= limit
    assert count == len(tokens) or sum(tokens[: count + 1]) > limit
