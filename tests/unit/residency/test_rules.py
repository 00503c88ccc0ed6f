"""Rules of eviction: GDSF beside its definition and beside LRU, and pins under both."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.residency.ledger import Ledger
from giornata.residency.rules import Gdsf, Lru, Rule, RuleName, rule_of

NAMES = st.sampled_from("abcdefgh")
USES = st.lists(st.tuples(NAMES, st.floats(0, 5)), max_size=80)


def replay(rule: Rule, uses: list[tuple[str, float]], budget: int, sizes: dict[str, int]) -> list[str]:
    """Names that went, in order, where each use of an absent name loads it."""
    ledger, gone, now = Ledger(budget, rule), list[str](), 0.0
    for name, pause_s in uses:
        now += pause_s
        if not ledger.use(name, now):
            gone += ledger.add(name, sizes[name], reload_ms=float(sizes[name]), now=now)
        assert ledger.size_bytes <= budget
    return gone


@given(USES, st.integers(1, 5))
def test_with_equal_costs_and_uses_gdsf_is_lru(uses: list[tuple[str, float]], budget: int) -> None:
    """Uses that are forgotten at once are all equal."""
    sizes = dict.fromkeys("abcdefgh", 1)
    apart = [(name, pause_s + 1.0) for name, pause_s in uses]
    assert replay(Gdsf(half_life_s=1e-3), apart, budget, sizes) == replay(Lru(), apart, budget, sizes)


@given(USES, st.integers(3, 12), st.lists(st.integers(1, 3), min_size=8, max_size=8))
def test_gdsf_lets_go_by_its_definition(uses: list[tuple[str, float]], budget: int, sizes: list[int]) -> None:
    """Beside a model: H = clock + uses · cost ÷ size; the clock is the H of the latest that went."""
    size = dict(zip("abcdefgh", sizes, strict=True))
    here: dict[str, float] = {}
    order: list[str] = []
    clock, now, expected = 0.0, 0.0, list[str]()
    history: dict[str, list[float]] = {}
    for name, pause_s in uses:
        now += pause_s
        history.setdefault(name, []).append(now)
        counted = sum(0.5 ** ((now - at) / 1800.0) for at in history[name])
        here[name] = clock + counted  # cost ÷ size is 1
        order = [other for other in order if other != name] + [name]
        while sum(size[other] for other in here) > budget:
            least = min((other for other in order if other != name), key=lambda other: here[other])
            clock = max(clock, here.pop(least))
            order.remove(least)
            expected.append(least)
    assert replay(Gdsf(), uses, budget, size) == expected


def test_what_costs_more_to_load_stays_longer() -> None:
    ledger = Ledger(2, Gdsf())
    ledger.add("slow", 1, reload_ms=100.0)
    ledger.add("fast", 1, reload_ms=1.0)
    assert ledger.add("new", 1, reload_ms=1.0) == ("fast",)


def test_what_was_popular_once_is_overtaken() -> None:
    """Beside a name with eight uses, names that come once push each other out, and at last that one."""
    ledger, gone = Ledger(2, Gdsf()), list[str]()
    for place, name in enumerate((*("old",) * 8, *(f"new{number}" for number in range(24)))):
        if not ledger.use(name, float(place)):
            gone += ledger.add(name, 1, now=float(place))
    assert gone.index("old") > 5
    assert len(gone) == 23


@pytest.mark.parametrize("name", list(RuleName))
@given(USES, st.sets(NAMES, max_size=3), st.integers(0, 6))
def test_pinned_names_never_go(
    name: RuleName, uses: list[tuple[str, float]], pinned: set[str], budget: int
) -> None:
    ledger, now, gone = Ledger(budget, rule_of(name)), 0.0, list[str]()
    for each in sorted(pinned):
        ledger.pin(each)
    for each, pause_s in uses:
        now += pause_s
        if not ledger.use(each, now):
            gone += ledger.add(each, 1, now=now)
    assert not pinned & set(gone)
    assert ledger.room_bytes == budget - sum(each in ledger for each in pinned)
    # the latest stays, be there room or not: its user holds it
    assert ledger.size_bytes <= max(budget, 1 + sum(each in ledger for each in pinned))
