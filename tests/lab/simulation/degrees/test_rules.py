"""All rules on random small workloads: every decision holds, no rule beats the bound; switches reach the rules."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.scheduling.degrees.rule import ReplanningOptions
from giornata_lab.simulation.degrees.rules import (
    POWERS,
    PoolRuleCase,
    RuleName,
    RuleSetting,
    TieBreak,
    bound_of,
    run_case,
)
from giornata_lab.simulation.degrees.workloads import PoolWorkload, SizeMix

ALL = [
    RuleSetting(),
    RuleSetting(parts=ReplanningOptions(waits=False, widens=False)),
    RuleSetting(RuleName.EVENTS, POWERS),
    RuleSetting(RuleName.ROUNDS, POWERS),
    RuleSetting(RuleName.ROUNDS, POWERS, round_steps=1, ties=TieBreak.FEWEST),
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
    assert run.summary.attainment <= bound_of(load, devices) + 1e-9


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
    ],
    ids=str,
)
def test_every_switch_of_the_rule_changes_what_it_does(other: RuleSetting) -> None:
    assert ends_of(other) != ends_of(RuleSetting())
