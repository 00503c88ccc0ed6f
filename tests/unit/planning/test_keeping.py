"""What a template keeps within a budget of bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from giornata.planning.operations import LEAST_LEVELS, TemplateRunScope, largest_scope_within

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
