"""All rules on random small workloads: every decision holds, no rule beats the bound; switches reach the rules."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.scheduling.degrees.pool import PoolDecision, PoolRow, StepStart
from giornata.scheduling.degrees.rule import ReplanningOptions
from giornata_lab.simulation.degrees import step_times
from giornata_lab.simulation.degrees.baselines import RoundSwitches, TieBreak
from giornata_lab.simulation.degrees.results import charts, summarise
from giornata_lab.simulation.degrees.rules import (
    BEST_DEGREES,
    POWERS,
    BoundCase,
    MultiStepRule,
    PoolRuleCase,
    RuleName,
    RuleSetting,
    bound_of,
    every_subset,
    run_case,
)
from giornata_lab.simulation.degrees.workloads import PoolWorkload, SizeMix

ALL = [
    RuleSetting(),
    RuleSetting(parts=ReplanningOptions(waits=False, widens=False)),
    RuleSetting(steps_between=4),
    RuleSetting(every_subset=True),
    RuleSetting(RuleName.EVENTS, POWERS),
    RuleSetting(RuleName.ROUNDS, POWERS),
    RuleSetting(
        RuleName.ROUNDS, POWERS, round_steps=1, rounds=RoundSwitches(TieBreak.FEWEST, placement=False)
    ),
    RuleSetting(RuleName.DEADLINE, POWERS),
    RuleSetting(RuleName.RESOLUTION, POWERS),
    RuleSetting(RuleName.FIXED, (4,)),
]
loads = st.builds(
    PoolWorkload,
    mix=st.sampled_from(list(SizeMix)),
    scale=st.sampled_from([0.8, 1.0, 1.5, 3.0]),
    per_minute=st.sampled_from([12.0, 60.0, 600.0]),
    cv=st.sampled_from([1.0, 3.0]),
    steps=st.integers(1, 12),
    requests=st.integers(1, 9),
    masks=st.sampled_from([None, None, "production"]),
    seed=st.integers(0, 10**6),
)


@given(loads, st.sampled_from(ALL), st.sampled_from([4, 8]))
def test_no_rule_beats_the_bound_and_all_rows_end(
    load: PoolWorkload, rule: RuleSetting, devices: int
) -> None:
    run = run_case(PoolRuleCase(load, rule, devices))
    assert len(run.outcomes) == load.requests
    assert all(outcome.degrees.total() == load.steps for outcome in run.outcomes)
    assert run.summary.attainment <= bound_of(BoundCase(load, devices=devices)) + 1e-9


LOADED = PoolWorkload(mix=SizeMix.SKEWED, scale=1.0, per_minute=18, cv=3.0, requests=60, seed=2)
"""More than a pool can do in time."""


def ends_of(rule: RuleSetting, scale: float = 1.0) -> list[float]:
    return [outcome.end_s for outcome in run_case(PoolRuleCase(replace(LOADED, scale=scale), rule)).outcomes]


@pytest.mark.parametrize(
    "other",
    [
        *(
            RuleSetting(parts=ReplanningOptions(**{part: False}))  # type: ignore[arg-type]  # of bools alone
            for part in ("waits", "widens")
        ),
        RuleSetting(parts=ReplanningOptions(ages_s=math.inf)),
        RuleSetting(parts=ReplanningOptions(cap_s=math.inf)),
        RuleSetting(degrees=POWERS),
        RuleSetting(steps_between=2),
    ],
    ids=str,
)
def test_every_switch_of_the_rule_changes_what_it_does(other: RuleSetting) -> None:
    assert ends_of(other) != ends_of(RuleSetting())


ROUNDS = RuleSetting(RuleName.ROUNDS, POWERS)


@pytest.mark.parametrize(
    "other",
    [
        *(
            replace(ROUNDS, rounds=RoundSwitches(**{part: False}))  # type: ignore[arg-type]  # of bools alone
            for part in ("scale_up", "fill", "idle_start", "whole_steps")
        ),
        replace(ROUNDS, rounds=RoundSwitches(TieBreak.FEWEST)),
        replace(ROUNDS, round_steps=2),
    ],
    ids=str,
)
def test_every_switch_of_rounds_changes_what_they_do(other: RuleSetting) -> None:
    assert ends_of(other, 1.5) != ends_of(ROUNDS, 1.5)


def test_rounds_keep_rows_where_they_are() -> None:
    kept, moved = (
        run_case(
            PoolRuleCase(LOADED, replace(ROUNDS, rounds=RoundSwitches(placement=placement)))
        ).summary.moved
        for placement in (True, False)
    )
    assert kept < moved


def test_masks_compute_less_than_whole_pictures() -> None:
    load = PoolWorkload(masks="production", steps=10, requests=40, per_minute=200)
    masked, full = (
        run_case(PoolRuleCase(replace(load, in_full=in_full), RuleSetting())) for in_full in (False, True)
    )
    assert masked.summary.busy < full.summary.busy
    assert masked.summary.mean_s < full.summary.mean_s


def test_the_best_degree_by_resolution_is_what_every_row_gets() -> None:
    for name in (RuleName.RESOLUTION, RuleName.DEADLINE):
        run = run_case(PoolRuleCase(PoolWorkload(requests=40, steps=4), RuleSetting(name, POWERS)))
        for outcome in run.outcomes:
            assert dict(outcome.degrees) == {BEST_DEGREES[outcome.request.size.side]: 4}
            assert outcome.moves == 0
    small = run_case(
        PoolRuleCase(PoolWorkload(requests=20, steps=4), RuleSetting(RuleName.RESOLUTION, POWERS), 4)
    )
    widest = {outcome.request.size.side: max(outcome.degrees) for outcome in small.outcomes}
    assert widest[2048] == 4


def test_a_rule_that_decides_less_often_begins_several_steps() -> None:
    class One:
        def decide(self, *_: object) -> PoolDecision:
            return PoolDecision((StepStart((0,), (1,)), StepStart((1,), (0,))), wake_s=3.0)

    times = {1: 1.0}
    rows = [PoolRow(key, 0.0, 9.0, left, times, times) for key, left in ((0, 2), (1, 30))]
    decision = MultiStepRule(One(), 5).decide(0.0, rows, frozenset((0, 1)))
    assert [begin.steps for begin in decision.begins] == [2, 5]
    assert decision.wake_s == 3.0


def test_all_subsets_of_eight_devices() -> None:
    subsets = every_subset(8, (1, 2, 3, 4, 6, 8))
    assert len(subsets) == 8 + 28 + 56 + 70 + 28 + 1
    assert (0, 3, 7) in subsets


def test_charts_have_what_varies_and_the_bound() -> None:
    runs = [
        run_case(PoolRuleCase(PoolWorkload(scale=scale, requests=5, steps=3, seed=seed), rule))
        for scale in (1.0, 1.5)
        for seed in (0, 1)
        for rule in (ALL[0], ALL[5])
    ]
    drawn = charts(runs, {run.workload: 0.9 for run in runs})
    lines = drawn["attainment_by_scale_uniform.svg"].lines
    assert lines.keys() == {"replanning", "rounds of 5, eager", "bound"}
    assert lines["bound"] == [(1.0, 0.9), (1.5, 0.9)]
    first = [run.summary.attainment for run in runs if run.rule == "replanning"][:2]
    assert lines["replanning"][0] == pytest.approx((1.0, sum(first) / 2))
    assert "attainment_by_rate_uniform.svg" not in drawn
    assert len(drawn["latency_cdf_uniform.svg"].lines["replanning"]) >= 20
    with pytest.raises(ValueError, match="one request or more"):
        summarise([], 8, 0)


def test_a_summary_counts_time_of_devices_and_moves() -> None:
    run = run_case(
        PoolRuleCase(PoolWorkload(requests=1, steps=10, scale=100), RuleSetting(RuleName.FIXED, (4,)))
    )
    size = run.outcomes[0].request.size
    assert run.summary.mean_s == pytest.approx(10 * step_times.times(size, (4,))[4])
    assert run.summary.busy == pytest.approx(0.5)
    assert (run.summary.moved, run.summary.met, run.summary.decisions) == (0.0, 1, 10)
