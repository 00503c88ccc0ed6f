"""What holds for every plan: it fits, says the same again, and is at rest once it was carried out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.residency.popularity import AdapterUsage
from giornata.residency.use_based import ResidencySnapshot, TierKind
from giornata_lab.simulation.baselines import PLANNERS
from tests.examples import examples
from tests.unit.residency.plans.clusters import Drawn, applied, drawn

NOW = 100.0
each_plan = pytest.mark.parametrize("name", list(PLANNERS))


@each_plan
@given(drawn(), st.integers(0, 3))
def test_wanted_sets_are_of_the_catalogue_and_within_budgets(name: str, case: Drawn, seed: int) -> None:
    wanted = PLANNERS[name].make(seed)(case.observed, case.uses, NOW)
    sizes = case.observed.sizes
    budgets = {place.name: place.budget_bytes for place in case.observed.places}
    for place, digests in wanted.items():
        assert len(set(digests)) == len(digests)
        assert sum(sizes[digest] for digest in digests) <= budgets[place]


@each_plan
@given(drawn(), st.integers(0, 3))
def test_a_plan_says_the_same_twice_for_a_seed(name: str, case: Drawn, seed: int) -> None:
    planner = PLANNERS[name]
    once = planner.make(seed)(case.observed, case.uses, NOW)
    assert planner.make(seed)(case.observed, case.uses, NOW) == once


@each_plan
@examples(times=2)  # most draws have room for all
@given(drawn(), st.integers(0, 3))
def test_a_plan_that_was_carried_out_stays(name: str, case: Drawn, seed: int) -> None:
    plan = PLANNERS[name].make(seed)
    wanted = plan(case.observed, case.uses, NOW)
    again = plan(applied(case.observed, wanted), case.uses, NOW)
    assert {place: set(digests) for place, digests in again.items()} == {
        place: set(digests) for place, digests in wanted.items()
    }


@each_plan
@given(drawn())
def test_hosts_want_what_is_pinned_first(name: str, case: Drawn) -> None:
    wanted = PLANNERS[name].make(0)(case.observed, case.uses, NOW)
    for place in case.observed.places:
        if place.kind is TierKind.HOST:
            pinned = {digest for digest in wanted[place.name] if digest in case.observed.pinned}
            assert set(wanted[place.name][: len(pinned)]) == pinned
            if sum(case.observed.sizes[digest] for digest in case.observed.pinned) <= place.budget_bytes:
                assert pinned == case.observed.pinned


@each_plan
def test_nothing_is_wanted_of_nothing(name: str) -> None:
    assert PLANNERS[name].make(0)(ResidencySnapshot((), {}), AdapterUsage(), NOW) == {}
