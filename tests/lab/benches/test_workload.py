"""What the benchmarks serve."""

from __future__ import annotations

from giornata.planning.operations import SequenceShape
from giornata.wire.models import BlockSpec
from giornata.wire.values import BlockMode
from giornata_lab.bench.compute.workload import (
    MIXES,
    PERCENTILES,
    arrivals,
    edits,
    operation_limit,
    token_limit,
)
from giornata_lab.loadgen.workload import at_percentile


def test_few_edits_still_follow_both_distributions() -> None:
    drawn = edits(8, MIXES["8/20/28/50"], templates=2, seed=1)
    assert sorted(edit.steps for edit in drawn) == [8, 8, 20, 20, 28, 28, 50, 50]
    below, above = (
        sum(edit.ratio < at_percentile(PERCENTILES, share) for edit in drawn) for share in (0.5, 1)
    )
    assert (below, above) == (4, 8)


def test_a_seed_makes_the_same_edits_and_another_one_others() -> None:
    same = [edits(8, MIXES["production"], templates=2, seed=seed) for seed in (3, 3, 4)]
    assert same[0] == same[1] != same[2]


def test_pictures_of_a_request_share_all_but_their_number() -> None:
    of = edits(2, {4: 1.0}, templates=1, seed=0)
    found = arrivals([0.1, 0.2, 0.3], of, {4: 1.0}, seed=0)
    assert [edit.index for request in found for edit in request.edits] == list(range(12))
    assert all(len({(e.ratio, e.top, e.steps) for e in request.edits}) == 1 for request in found)
    assert found[2].edits[0].ratio == of[0].ratio


def test_the_limit_is_total_tokens_in_full_over_total_tokens_computed() -> None:
    assert token_limit(512, 4096, [4096, 4096]) == 1.0
    assert token_limit(100, 900, [0, 100]) == 2000 / 300
    assert token_limit(100, 900, [0, 100], padding=60) == 2000 / 180


def test_projecting_tokens_outside_counts_among_operations() -> None:
    """By hand, for a block of width 1: 12 a computed token, 2 a projected one, 2 a pair."""
    spec = BlockSpec(linear=12.0, text=12.0, outside=2.0, pair=2.0, text_pair=2.0)
    shape = SequenceShape(text=10, image=90, computed=20)
    full = 12 * 100 + 2 * 100 * 100
    assert operation_limit([spec], shape, BlockMode.HIDDEN) == full / (12 * 30 + 2 * 70 + 2 * 30 * 100)
    assert operation_limit([spec], shape, BlockMode.KV) == full / (12 * 30 + 2 * 30 * 100)
