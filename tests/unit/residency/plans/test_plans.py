"""What holds for every plan: it fits, says the same again, and is at rest once it was carried out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.residency.use_based import AdapterUsage, ResidencySnapshot, TierKind
from giornata_lab.simulation.baselines import PLANNERS
from tests.unit.residency.plans.clusters import Drawn, applied, drawn

NOW = 100.0


@pytest.mark.parametrize("name", list(PLANNERS))
@given(drawn(), st.integers(0, 3))
def test_a_plan_fits_begins_with_pins_and_stays_the_same(name: str, case: Drawn, seed: int) -> None:
    plan, observed, uses = PLANNERS[name].make(seed), case.observed, case.uses
    wanted = plan(observed, uses, NOW)
    for place in observed.places:
        digests = wanted.get(place.name, ())
        assert len(set(digests)) == len(digests)
        assert sum(observed.sizes[digest] for digest in digests) <= place.budget_bytes
        if place.kind is TierKind.HOST:
            pinned = {digest for digest in digests if digest in observed.pinned}
            assert set(digests[: len(pinned)]) == pinned
            if sum(observed.sizes[digest] for digest in observed.pinned) <= place.budget_bytes:
                assert pinned == observed.pinned
    assert PLANNERS[name].make(seed)(observed, uses, NOW) == wanted
    again = plan(applied(observed, wanted), uses, NOW)
    assert {place: set(digests) for place, digests in again.items()} == {
        place: set(digests) for place, digests in wanted.items()
    }


@pytest.mark.parametrize("name", list(PLANNERS))
def test_nothing_is_wanted_of_nothing(name: str) -> None:
    assert PLANNERS[name].make(0)(ResidencySnapshot((), {}), AdapterUsage(), NOW) == {}
