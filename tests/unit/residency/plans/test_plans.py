"""The plan of placement: nothing goes for what is used less, nothing takes turns, and what is new goes home."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.residency.use_based import (
    LEAST_USES,
    STICKY,
    AdapterTier,
    AdapterUsage,
    ResidencySnapshot,
    Wanted,
    rank_homes,
    use_plan,
)

ADAPTERS = tuple(f"{number:02d}" * 2 for number in range(24))


@dataclass(frozen=True)
class Drawn:
    """A cluster, and jobs: the time of each and its adapters."""

    observed: ResidencySnapshot
    jobs: tuple[tuple[float, frozenset[str]], ...]

    @property
    def uses(self) -> AdapterUsage:
        uses = AdapterUsage()
        for at_s, asked in self.jobs:
            uses.see(asked, at_s)
        return uses


@st.composite
def drawn(draw: st.DrawFn, hosts: int = 5) -> Drawn:
    sizes = {digest: draw(st.integers(1, 100)) for digest in ADAPTERS}
    some = st.frozensets(st.sampled_from(ADAPTERS), max_size=10)
    places = []
    for number in range(draw(st.integers(1, hosts))):
        held = {digest: sizes[digest] for digest in sorted(draw(some))}
        places.append(AdapterTier(f"host-{number}", budget_bytes=draw(st.integers(0, 400)), held=held))
    asked = st.frozensets(st.sampled_from(ADAPTERS), min_size=1, max_size=3)
    times = st.floats(0.0, 100.0, allow_nan=False)
    jobs = draw(st.lists(st.tuples(times, asked), max_size=60))
    observed = ResidencySnapshot(tuple(places), sizes, pinned=draw(some), registered=draw(some))
    return Drawn(observed, tuple(sorted(jobs, key=lambda job: job[0])))


def applied(observed: ResidencySnapshot, wanted: Wanted) -> ResidencySnapshot:
    """The cluster once every place has what is wanted of it, and nothing else."""
    places = (replace(place, held=_sized(observed.sizes, wanted[place.name])) for place in observed.places)
    return replace(observed, places=tuple(places))


def _sized(sizes: Mapping[str, int], digests: tuple[str, ...]) -> dict[str, int]:
    return {digest: sizes[digest] for digest in digests}


NOW = 100.0


@given(drawn())
def test_a_plan_fits_begins_with_pins_and_stays_the_same(case: Drawn) -> None:
    observed, uses = case.observed, case.uses
    wanted = use_plan(observed, uses, NOW)
    for place in observed.places:
        digests = wanted[place.name]
        assert len(set(digests)) == len(digests)
        assert sum(observed.sizes[digest] for digest in digests) <= place.budget_bytes
        pinned = {digest for digest in digests if digest in observed.pinned}
        assert set(digests[: len(pinned)]) == pinned
        if sum(observed.sizes[digest] for digest in observed.pinned) <= place.budget_bytes:
            assert pinned == observed.pinned
    again = use_plan(applied(observed, wanted), uses, NOW)
    assert {place: set(digests) for place, digests in again.items()} == {
        place: set(digests) for place, digests in wanted.items()
    }


def test_nothing_is_wanted_of_nothing() -> None:
    assert use_plan(ResidencySnapshot((), {}), AdapterUsage(), NOW) == {}


def seen(**counts: int) -> AdapterUsage:
    uses = AdapterUsage()
    for digest, count in counts.items():
        for _ in range(count):
            uses.see([digest], NOW)
    return uses


def host(budget_bytes: int, **held: int) -> AdapterTier:
    return AdapterTier("one", budget_bytes, held)


@given(drawn(hosts=1))
def test_nothing_goes_for_what_is_used_less(case: Drawn) -> None:
    observed = replace(case.observed, pinned=frozenset(), registered=frozenset())
    uses, sizes = case.uses, observed.sizes
    (place,) = observed.places
    if sum(place.held.values()) > place.budget_bytes:
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


def test_what_is_used_most_is_wanted_and_what_is_small_goes_for_it_where_that_keeps_more() -> None:
    sizes = {"large": 100, "small": 10}
    fresh = use_plan(ResidencySnapshot((host(100),), sizes), seen(large=4, small=3), NOW)
    assert fresh == {"one": ("large",)}
    observed = ResidencySnapshot((host(100, large=100),), sizes)
    assert use_plan(observed, seen(large=4, small=30), NOW) == {"one": ("large",)}  # 4 * 100 > 30 * 10 / 1.25
    assert use_plan(observed, seen(large=4, small=60), NOW) == {"one": ("small",)}


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
    places = tuple(AdapterTier(name, 100, {"old": 100}) for name in ("one", "two", "three"))
    sizes = {"old": 100, "new": 100}
    observed = ResidencySnapshot(places, sizes, registered=frozenset({"new"}))
    home = rank_homes("new", [place.name for place in places])[0]
    idle = use_plan(observed, AdapterUsage(), NOW)
    assert {name for name, digests in idle.items() if "new" in digests} == {home}
    assert all("new" not in digests for digests in use_plan(observed, seen(old=9), NOW).values())


def test_uses_count_less_at_each_further_place() -> None:
    places = tuple(AdapterTier(name, 10) for name in ("one", "two"))
    uses = AdapterUsage()
    uses.see(["a"], NOW - 1800 * 4)  # a sixteenth of a use; a thirty-second at the second place
    wanted = use_plan(ResidencySnapshot(places, {"a": 10}), uses, NOW)
    first, second = rank_homes("a", ("one", "two"))
    assert wanted == {first: ("a",), second: ()}


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_place_that_comes_takes_its_own_adapters_alone(name: str) -> None:
    before, after = rank_homes(name, ("one", "two")), rank_homes(name, ("one", "two", "three"))
    assert [place for place in after if place != "three"] == before
