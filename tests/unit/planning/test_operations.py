"""What a step computes, beside sums made by hand, and what a template keeps within a budget of bytes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.planning.operations import (
    LEAST_LEVELS,
    NETWORK,
    NetworkOperations,
    SequenceShape,
    TemplateRunScope,
    largest_scope_within,
    low_rank_weights,
    step_work,
)
from giornata.wire.models import BlockSpec
from giornata.wire.values import BlockMode

WIDTH, RANK = 8, 2
SPECS = (BlockSpec(linear=3.0 * WIDTH**2, text=3.0 * WIDTH**2, outside=2.0 * WIDTH**2, pair=2.0, count=3),)
"""Three square modules a block; keys and values of outside cells pass two of them."""
FACTORS = 3 * 3 * RANK * 2 * WIDTH
"""Weights of factors on all nine modules."""


def multiplied(tokens: int, modules: int) -> int:
    """Multiplications of the factors of so many modules, token by token."""
    return sum(RANK * WIDTH + WIDTH * RANK for _ in range(tokens) for _ in range(modules))


@given(
    modes=st.lists(st.sampled_from(list(BlockMode)), min_size=3, max_size=3),
    computed=st.integers(1, 20),
    text=st.integers(0, 5),
)
def test_factors_multiply_the_tokens_that_pass_their_modules(
    modes: Sequence[BlockMode], computed: int, text: int
) -> None:
    shape = SequenceShape(text, 20, computed, low_rank=FACTORS, segments=0.5)
    expected = 0
    for mode in modes:
        own = 20 if mode is BlockMode.FULL else computed
        expected += multiplied(own + text, 3)
        expected += multiplied(20 - computed, 2) if mode is BlockMode.HIDDEN else 0
    work = step_work(NetworkOperations(SPECS), [shape, shape], [modes, modes])
    assert work.low_rank == pytest.approx(2 * expected)
    assert (work.sequences, work.segments) == (2, 1)
    plain = step_work(NetworkOperations(SPECS), [SequenceShape(text, 20, computed)] * 2, [modes, modes])
    assert work[: len(NETWORK)] == pytest.approx(plain[: len(NETWORK)])
    assert (plain.low_rank, plain.segments, plain.control) == (0, 0, 0)


@pytest.mark.parametrize("convolution", [0.0, 40.0])
def test_cells_of_a_coarse_block_meet_its_weights_as_often_as_there_are_coarse_cells(
    convolution: float,
) -> None:
    linear = 100.0 - convolution
    fine = BlockSpec(linear=linear, convolution=convolution)
    coarse = BlockSpec(linear=linear / 4, convolution=convolution / 4, grain=2)
    work = step_work(
        NetworkOperations([fine, coarse]), [SequenceShape(0, 16, 16, low_rank=20.0)], [[BlockMode.FULL] * 2]
    )
    assert work.low_rank == pytest.approx(10 * 16 + 10 * 4)


def test_control_work_is_added_once_however_many_blocks_there_are() -> None:
    shape = SequenceShape(2, 20, 5, control=50.0 * 22)
    assert step_work(NetworkOperations(SPECS), [shape], [[BlockMode.KV] * 3]).control == pytest.approx(
        50 * 22
    )


def test_weights_that_were_not_counted_are_told_by_the_size_of_a_file_of_16_bits() -> None:
    assert low_rank_weights(96, 1000) == 96
    assert low_rank_weights(0, 1000) == 500


COUNTS = st.integers(1, 60)


@given(st.integers(0, 10**6), COUNTS, COUNTS, st.integers(1, 2000), st.integers(1, 60))
def test_what_is_kept_fits_and_keeps_its_least_levels(
    budget: int, levels: int, blocks: int, block_bytes: int, least: int
) -> None:
    kept = largest_scope_within(
        budget, levels=levels, blocks=blocks, block_bytes=block_bytes, least_levels=least
    )
    assert min(levels, least) <= kept.levels <= levels
    assert 0 <= kept.first_block <= blocks
    assert kept.levels * (blocks - kept.first_block) * block_bytes <= budget
    more = kept.levels * (blocks - kept.first_block + 1) * block_bytes
    assert kept.first_block == 0 or more > budget, "one more block would not have fitted"


def test_levels_that_may_not_be_dropped_cost_blocks() -> None:
    assert largest_scope_within(100, levels=10, blocks=20, block_bytes=1) == TemplateRunScope(5, 0)
    assert largest_scope_within(
        100, levels=10, blocks=20, block_bytes=1, least_levels=10
    ) == TemplateRunScope(10, 10)
    assert largest_scope_within(10, levels=10, blocks=20, block_bytes=1) == TemplateRunScope(LEAST_LEVELS, 18)
