"""Workloads: sizes, deadlines, arrivals, masks."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from giornata_lab.simulation.degrees.workloads import (
    SLO_S,
    PoolWorkload,
    SizeMix,
    computed_tokens,
    mix_weights,
    tokens_of,
)

MANY = PoolWorkload(requests=4000, seed=3)


def test_equal_workloads_draw_equal_requests_and_seeds_differ() -> None:
    assert PoolWorkload(seed=1).draw() == PoolWorkload(seed=1).draw()
    assert PoolWorkload(seed=1).draw() != PoolWorkload(seed=2).draw()


def test_a_deadline_is_the_sizes_limit_times_the_scale() -> None:
    for request in PoolWorkload(scale=1.3, requests=50).draw():
        assert request.due_s - request.at_s == pytest.approx(1.3 * SLO_S[request.size.side])
        assert not request.size.masked


def test_the_skewed_mix_asks_for_large_pictures_more_often() -> None:
    weights = mix_weights(SizeMix.SKEWED)
    assert weights[2048] / weights[1024] == pytest.approx(math.exp((16384 - 4096) / 16384))
    drawn = Counter(request.size.side for request in replace(MANY, mix=SizeMix.SKEWED).draw())
    assert {side: count / 4000 for side, count in drawn.items()} == pytest.approx(weights, abs=0.03)
    even = Counter(request.size.side for request in MANY.draw())
    assert min(even.values()) > 900


@pytest.mark.parametrize("cv", [1.0, 3.0])
def test_arrivals_have_the_rate_and_the_variation_that_is_asked_for(cv: float) -> None:
    times = [request.at_s for request in replace(MANY, requests=40000, per_minute=30, cv=cv).draw()]
    gaps = [after - before for before, after in pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(2.0, rel=0.05)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.06)


def test_a_variation_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"received a coefficient of variation of 0\.5"):
        PoolWorkload(cv=0.5)


def test_a_mask_has_a_halo_and_is_rounded_up_to_few_shapes() -> None:
    assert computed_tokens(0.25, 4096) == 1216  # 32 + 2 tokens a side, 1156
    assert computed_tokens(0.99, 4096) == 4096
    assert computed_tokens(0.0001, 1024) == 64


def test_masks_are_those_of_the_trace_and_in_full_draws_the_same_pictures() -> None:
    masked = PoolWorkload(masks="production", requests=500).draw()
    assert {request.size.side for request in masked} == {512, 1024, 2048}
    share = statistics.fmean(request.size.computed / request.size.tokens for request in masked)
    assert 0.1 < share < 0.4
    full = PoolWorkload(masks="production", requests=500, in_full=True).draw()
    assert [(r.at_s, r.size.side) for r in full] == [(r.at_s, r.size.side) for r in masked]
    assert all(request.size.computed == tokens_of(request.size.side) for request in full)


@pytest.mark.parametrize("saved", [0.0, 0.1, 0.21, 0.24, 0.4, 0.5])
def test_a_prompt_cache_saves_the_share_of_steps_that_is_asked_for(saved: float) -> None:
    plain, helped = MANY.draw(), replace(MANY, saved=saved).draw()
    assert [(r.at_s, r.due_s, r.size) for r in helped] == [(r.at_s, r.due_s, r.size) for r in plain]
    assert 1 - statistics.fmean(r.steps for r in helped) / 50 == pytest.approx(saved, abs=0.01)
    assert {r.steps for r in helped} <= {50, 45, 40, 35, 30, 25}


def test_more_than_half_of_the_steps_cannot_be_saved() -> None:
    with pytest.raises(ValueError, match=r"received 0\.6 of the steps saved; accepted are 0 to 0\.5"):
        PoolWorkload(saved=0.6)
