"""What a ledger lets go of: the least recently used beside a model, and never what is pinned."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from giornata.residency.ledger import EvictionLedger

NAMES = st.sampled_from("abcdefgh")
USES = st.lists(NAMES, max_size=80)


@given(USES, st.integers(3, 12), st.lists(st.integers(1, 3), min_size=8, max_size=8))
def test_the_least_recently_used_goes_first(uses: list[str], budget: int, sizes: list[int]) -> None:
    size = dict(zip("abcdefgh", sizes, strict=True))
    ledger, order = EvictionLedger(budget), list[str]()
    for name in uses:
        gone = () if ledger.use(name) else ledger.add(name, size[name])
        order = [other for other in order if other != name] + [name]
        expected = list[str]()
        while sum(size[other] for other in order) > budget:
            expected.append(order.pop(0))
        assert list(gone) == expected
        assert ledger.size_bytes <= budget


@given(USES, st.sets(NAMES, max_size=3), st.integers(0, 6))
def test_pinned_names_never_go(uses: list[str], pinned: set[str], budget: int) -> None:
    ledger, gone = EvictionLedger(budget), list[str]()
    for each in sorted(pinned):
        ledger.pin(each)
    for each in uses:
        if not ledger.use(each):
            gone += ledger.add(each, 1)
    assert not pinned & set(gone)
    assert ledger.room_bytes == budget - sum(each in ledger for each in pinned)
    # the latest stays, be there room or not: its user holds it
    assert ledger.size_bytes <= max(budget, 1 + sum(each in ledger for each in pinned))
