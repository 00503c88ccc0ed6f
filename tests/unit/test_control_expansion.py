"""Which sample of a ControlNet goes behind which block, against the lines of diffusers' forward."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from giornata.control.layout import BlockCounts, flux_layout, sd3_layout, sum_residuals

COUNTS = st.integers(1, 20)


@given(double=COUNTS, single=COUNTS, doubles=COUNTS, singles=COUNTS, repeats=st.booleans())
def test_it_is_the_one_that_diffusers_adds(
    double: int, single: int, doubles: int, singles: int, repeats: bool
) -> None:
    base, samples = BlockCounts(double, single), BlockCounts(min(doubles, double), min(singles, single))
    interval = math.ceil(double / samples.double)
    expected = [block % samples.double if repeats else block // interval for block in range(double)]
    interval = math.ceil(single / samples.single)
    expected += [samples.double + block // interval for block in range(single)]
    assert flux_layout(base, samples, repeats=repeats) == tuple(expected)
    assert all(index < samples.double + samples.single for index in expected)


def test_without_samples_of_a_kind_nothing_is_added_there() -> None:
    base = BlockCounts(2, 3)
    assert flux_layout(base, BlockCounts(1, 0)) == (0, 0, None, None, None)
    assert flux_layout(base, BlockCounts(0, 1)) == (None, None, 0, 0, 0)


@given(blocks=st.integers(1, 40), samples=COUNTS)
def test_of_sd3_it_is_the_one_that_diffusers_adds(blocks: int, samples: int) -> None:
    samples = min(samples, blocks)
    interval = blocks / samples
    last_is_text_free = [int(block / interval) for block in range(blocks - 1)]
    assert sd3_layout(blocks, samples) == (*last_is_text_free, None)


NETS = st.integers(1, 8).flatmap(
    lambda blocks: st.lists(
        st.lists(st.one_of(st.none(), st.integers(0, 3)), min_size=blocks, max_size=blocks).map(tuple),
        min_size=1,
        max_size=3,
    )
)


@given(nets=NETS)
def test_a_sum_holds_what_every_net_adds_behind_its_blocks(nets: list[tuple[int | None, ...]]) -> None:
    found = sum_residuals(nets)
    for block, index in enumerate(found.behind):
        wanted = {(net, behind[block]) for net, behind in enumerate(nets) if behind[block] is not None}
        assert (set() if index is None else set(found.parts[index])) == wanted
    assert len(set(found.parts)) == len(found.parts), "equal sums are computed once"
    assert [found.behind.index(index) for index in range(len(found.parts))] == list(found.first)
