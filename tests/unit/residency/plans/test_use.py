"""The default plan: nothing goes for what is used less, nothing takes turns, and what is new goes home."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from giornata.residency.use_based import (
    LEAST_USES,
    STICKY,
    AdapterTier,
    AdapterUsage,
    ResidencySnapshot,
    TierKind,
    rank_homes,
    use_plan,
)
from tests.unit.residency.plans.clusters import Drawn, drawn

NOW = 100.0


def seen(**counts: int) -> AdapterUsage:
    uses = AdapterUsage()
    for digest, count in counts.items():
        for _ in range(count):
            uses.see([digest], NOW)
    return uses


def host(budget_bytes: int, **held: int) -> AdapterTier:
    return AdapterTier("one", TierKind.HOST, "one", budget_bytes, held, bytes_per_s=1.0, latency_s=100.0)


@given(drawn(hosts=1))
def test_nothing_goes_for_what_is_used_less(case: Drawn) -> None:
    observed = replace(case.observed, pinned=frozenset(), registered=frozenset())
    uses, sizes = case.uses, observed.sizes
    place = next(place for place in observed.places if place.kind is TierKind.HOST)
    if place.used_bytes > place.budget_bytes:
        return
    wanted = set(use_plan(observed, uses, NOW)[place.name])
    gone = [
        digest for digest in place.held if digest not in wanted and uses.lately(digest, NOW) >= LEAST_USES
    ]
    came = [digest for digest in wanted if digest not in place.held]
    for digest in gone:
        assert any(uses.lately(other, NOW) > STICKY * uses.lately(digest, NOW) for other in came)
    if not came:
        assert not gone
    assert sum(sizes[digest] for digest in wanted) <= place.budget_bytes


def test_the_worth_is_uses_times_reload_time_over_bytes() -> None:
    sizes = {"large": 100, "one": 50, "two": 50}
    few = use_plan(ResidencySnapshot((host(100),), sizes), seen(large=4, one=3, two=3), NOW)
    assert few == {"one": ("one", "two")}  # 3 (100 + 50) / 50 = 9 against 4 (100 + 100) / 100 = 8
    many = use_plan(ResidencySnapshot((host(100),), sizes), seen(large=6, one=3, two=3), NOW)
    assert many == {"one": ("large",)}  # 6 (100 + 100) is more than 1.25 times 2 * 3 (100 + 50)


def test_a_held_adapter_goes_for_one_that_is_used_well_more_alone() -> None:
    sizes = {"held": 100, "new": 100}
    place = host(100, held=100)
    assert use_plan(ResidencySnapshot((place,), sizes), seen(held=8, new=9), NOW) == {"one": ("held",)}
    assert use_plan(ResidencySnapshot((place,), sizes), seen(held=8, new=11), NOW) == {"one": ("new",)}


def test_two_adapters_of_about_the_same_worth_do_not_take_turns() -> None:
    sizes = {"a": 100, "b": 100}
    uses, place = AdapterUsage(), host(100, a=100)
    for turn in range(200):
        uses.see(["a" if turn % 2 else "b"], NOW + turn)
        if turn >= 20:
            assert use_plan(ResidencySnapshot((place,), sizes), uses, NOW + turn) == {"one": ("a",)}


def test_what_is_registered_is_wanted_at_its_home_alone_and_displaces_nothing_used_more() -> None:
    places = tuple(
        AdapterTier(name, TierKind.HOST, name, 100, {"old": 100}, bytes_per_s=1.0)
        for name in ("one", "two", "three")
    )
    sizes = {"old": 100, "new": 100}
    observed = ResidencySnapshot(places, sizes, registered=frozenset({"new"}))
    home = rank_homes("new", [place.name for place in places])[0]
    idle = use_plan(observed, AdapterUsage(), NOW)
    assert {name for name, digests in idle.items() if "new" in digests} == {home}
    assert all("new" not in digests for digests in use_plan(observed, seen(old=9), NOW).values())


def test_uses_count_less_at_each_further_place() -> None:
    places = tuple(AdapterTier(name, TierKind.HOST, name, 10, bytes_per_s=1.0) for name in ("one", "two"))
    uses = AdapterUsage()
    uses.see(["a"], NOW - 1800 * 4)  # a sixteenth of a use; a thirty-second at the second place
    wanted = use_plan(ResidencySnapshot(places, {"a": 10}), uses, NOW)
    first, second = rank_homes("a", ("one", "two"))
    assert wanted == {first: ("a",), second: ()}


def test_devices_are_left_alone() -> None:
    device = AdapterTier("w", TierKind.DEVICE, "one", 100)
    assert use_plan(ResidencySnapshot((device,), {"a": 1}), seen(a=1), NOW) == {}


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_place_that_comes_takes_its_own_adapters_alone(name: str) -> None:
    before, after = rank_homes(name, ("one", "two")), rank_homes(name, ("one", "two", "three"))
    assert [place for place in after if place != "three"] == before
