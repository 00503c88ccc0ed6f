"""Popularity: recency and frequency in one number, and what it means for a ledger."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.residency.popularity import Popularity
from giornata.residency.tiers import EvictionLedger

USES = st.lists(st.sampled_from("abc"), max_size=40)


@given(USES, st.floats(0.5, 100))
def test_each_use_counts_less_the_longer_ago_it_is(uses: list[str], half_life: float) -> None:
    """Beside the definition: the sum over all uses."""
    popularity = Popularity(half_life)
    for name in uses:
        popularity.use(name)
    for name in "abc":
        ages = [len(uses) - 1 - at for at, used in enumerate(uses) if used == name]
        expected = sum(2 ** (-age / half_life) for age in ages)
        assert popularity.score(name) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_a_net_that_many_use_outlives_one_that_was_used_last() -> None:
    popularity = Popularity()
    ledger = EvictionLedger(2, popularity.score)
    for name in (*("popular",) * 5, "passing"):
        popularity.use(name)
        ledger.add(name, 1)
    popularity.use("third")
    assert ledger.add("third", 1) == ("passing",)


def test_what_was_popular_long_ago_goes_at_last() -> None:
    popularity = Popularity(half_life=2)
    ledger = EvictionLedger(2, popularity.score)
    for name in (*("old",) * 5, *("new",) * 20):
        popularity.use(name)
        ledger.add(name, 1)
    popularity.use("third")
    assert ledger.add("third", 1) == ("old",)
