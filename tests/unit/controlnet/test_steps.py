"""Which waiting steps share a forward."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.wire.adapters import ControlKind
from giornata.wire.controlnets import ControlBase
from giornata_controlnet.compute_thread import count_sharing
from giornata_controlnet.rows import ActiveControlNet, OpenRow


@pytest.mark.parametrize(
    ("tokens", "limit", "count"),
    [([], 10, 0), ([4, 4, 4], 10, 2), ([4, 4, 4], 12, 3), ([30, 1], 10, 1), ([4, 30, 1], 10, 1)],
)
def test_steps_share_a_forward_up_to_a_limit_and_in_their_order(
    tokens: list[int], limit: int, count: int
) -> None:
    assert count_sharing(tokens, limit) == count


@given(st.lists(st.integers(1, 20), min_size=1), st.integers(1, 40))
def test_every_forward_takes_a_step_and_as_many_as_fit(tokens: list[int], limit: int) -> None:
    count = count_sharing(tokens, limit)
    assert 1 <= count <= len(tokens)
    assert count == 1 or sum(tokens[:count]) <= limit
    assert count == len(tokens) or sum(tokens[: count + 1]) > limit


def test_a_step_counts_the_work_of_the_controlnets_that_act_in_it() -> None:
    act: Any = None  # nothing is computed
    nets = [ActiveControlNet(act, 0, 2, 5.0), ActiveControlNet(act, 1, 4, 3.0)]
    base = ControlBase(
        kind=ControlKind.UNET, channels=(4,), latent_channels=4, token_pixels=16, text_channels=8
    )
    row = OpenRow("row", "denoiser", nets, (), base, (2, 3), (9.0, 5.0, 2.0, 1.0), 2, None, ExitStack())
    assert [row.work(step) for step in range(4)] == [5, 8, 3, 3]
