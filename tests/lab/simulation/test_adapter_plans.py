"""Simulated plans of placement: what holds for each, windows of uses, and ROCK's replicas against numbers by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata_lab.simulation.adapter_plans import (
    FULL,
    PLANNERS,
    RockPlan,
    SimResidency,
    SimTier,
    TierKind,
    WindowedUsage,
    clusters,
    replica_count,
)

ADAPTERS = tuple(f"{number:02d}" * 2 for number in range(24))
NOW = 100.0


@st.composite
def clusters_drawn(draw: st.DrawFn) -> SimResidency:
    sizes = {digest: draw(st.integers(1, 100)) for digest in ADAPTERS}
    some = st.frozensets(st.sampled_from(ADAPTERS), max_size=10)
    places = []
    for number in range(draw(st.integers(1, 5))):
        host = f"host-{number}"
        for name, kind in ((host, TierKind.HOST), (f"device-{number}", TierKind.DEVICE)):
            held = {digest: sizes[digest] for digest in sorted(draw(some))}
            budget_bytes, rate = draw(st.integers(0, 400)), draw(st.sampled_from((1e7, 1e8, 1e9)))
            places.append(SimTier(name, budget_bytes, held, kind, host, rate))
    return SimResidency(tuple(places), sizes)


@st.composite
def usage(draw: st.DrawFn) -> WindowedUsage:
    asked = st.frozensets(st.sampled_from(ADAPTERS), min_size=1, max_size=3)
    uses = WindowedUsage()
    for at_s in sorted(draw(st.lists(st.floats(0.0, NOW, allow_nan=False), max_size=60))):
        uses.see(draw(asked), at_s)
    return uses


@pytest.mark.parametrize("name", list(PLANNERS))
@given(clusters_drawn(), usage(), st.integers(0, 3))
def test_a_plan_fits_and_stays_the_same(
    name: str, observed: SimResidency, uses: WindowedUsage, seed: int
) -> None:
    plan = PLANNERS[name].make(seed)
    wanted = plan(observed, uses, NOW)
    for place in observed.places:
        digests = wanted.get(place.name, ())
        assert len(set(digests)) == len(digests)
        assert sum(observed.sizes[digest] for digest in digests) <= place.budget_bytes
    assert PLANNERS[name].make(seed)(observed, uses, NOW) == wanted
    places = (
        replace(place, held={one: observed.sizes[one] for one in wanted.get(place.name, place.held)})
        for place in observed.places
    )
    again = plan(observed._replace(places=tuple(places)), uses, NOW)
    assert {place: set(digests) for place, digests in again.items()} == {
        place: set(digests) for place, digests in wanted.items()
    }


@given(st.lists(st.tuples(st.floats(0, 50), st.sets(st.sampled_from("abcd"), max_size=3)), max_size=40))
def test_uses_in_a_window_are_those_of_their_definition(jobs: list[tuple[float, set[str]]]) -> None:
    uses, now, seen = WindowedUsage(window_s=60.0), 0.0, list[tuple[float, set[str]]]()
    for pause_s, asked in jobs:
        now += pause_s
        uses.see(asked, now)
        seen.append((now, asked))
    for digest in "abcd":
        expected = sum(at >= now - 30.0 and digest in asked for at, asked in seen)
        assert uses.counts(30.0, now)[digest] == expected
    together = sum(at >= now - 60.0 and {"a", "b"} <= asked for at, asked in seen)
    assert uses.together(60.0, now)["a", "b"] == together


# ROCK's placement, against numbers computed by hand, and what the paper leaves open.


def devices(count: int, held: Mapping[str, int] | None = None) -> tuple[SimTier, ...]:
    return tuple(
        SimTier(f"w{number:02d}", 1000, held or {}, TierKind.DEVICE, f"h{number:02d}")
        for number in range(count)
    )


def used(*jobs: tuple[str, ...]) -> WindowedUsage:
    uses = WindowedUsage()
    for asked in jobs:
        uses.see(asked, NOW)
    return uses


@pytest.mark.parametrize(
    ("count", "size", "expected"),
    [
        (1, 100, 1),  # 1.5
        (1, 25, 0),  # 1.5 / 2
        (10, 100, 5),  # 1.5 * 3.981 = 5.97
        (10, 400, 11),  # twice that, 11.94
        (100, 100, 23),  # 1.5 * 15.849 = 23.77
    ],
)
def test_replicas_grow_with_uses_and_the_root_of_the_size(count: int, size: int, expected: int) -> None:
    assert replica_count(count, size, 100.0) == expected


def test_a_popular_adapter_is_on_as_many_places_as_it_should() -> None:
    uses = used(*[("a",)] * 3)  # 1.5 * 3 ** 0.6 = 2.9
    wanted = RockPlan(1)(SimResidency(devices(8), {"a": 100, "b": 100}), uses, NOW)
    assert sum("a" in digests for digests in wanted.values()) == 2


def test_there_are_no_more_replicas_than_places() -> None:
    wanted = RockPlan()(SimResidency(devices(2), {"a": 100}), used(*[("a",)] * 50), NOW)
    assert wanted == {"w00": ("a",), "w01": ("a",)}


def test_uses_before_the_window_do_not_count() -> None:
    uses = WindowedUsage()
    uses.see(["a"], 0.0)
    assert RockPlan()(SimResidency(devices(2), {"a": 100}), uses, NOW) == {"w00": (), "w01": ()}


def test_beyond_85_percent_the_least_recently_used_goes() -> None:
    held = {"a": 400, "b": 400, "c": 400}
    uses = WindowedUsage()
    for at_s, digest in enumerate("bac"):  # all before the window
        uses.see([digest], float(at_s))
    wanted = RockPlan()(SimResidency(devices(1, held=held), held), uses, NOW)
    assert wanted == {"w00": ("c", "a")}
    assert 3 * 400 > FULL * 1000 >= 2 * 400


def test_a_place_with_more_bandwidth_is_drawn_more_often() -> None:
    slow, fast = devices(2)
    places = (replace(slow, bytes_per_s=1e9), replace(fast, bytes_per_s=3e9))
    drawn = [RockPlan(seed)(SimResidency(places, {"a": 100}), used(*[("a",)]), NOW) for seed in range(300)]
    share = sum("a" in wanted["w01"] for wanted in drawn) / len(drawn)
    assert share == pytest.approx(0.9, abs=0.06)  # score squared: 9 of 10


def test_the_host_that_has_it_is_nearer() -> None:
    places = devices(2)
    near = SimTier("h01", 1000, {"a": 100}, TierKind.HOST, "h01")
    drawn = [
        RockPlan(seed)(SimResidency((*places, near), {"a": 100}), used(("a",)), NOW) for seed in range(300)
    ]
    assert sum("a" in wanted["w01"] for wanted in drawn) / 300 == pytest.approx(0.8, abs=0.08)  # 4 of 5


@pytest.mark.parametrize(
    ("jobs", "together"),
    [
        ([("a", "b")] * 3 + [("a",)], True),
        ([("a", "b")] * 3, False),  # a was used three times
        ([("a", "b")] * 2 + [("a",)] * 2, False),  # half of its uses
    ],
)
def test_what_is_mostly_used_together_comes_together(jobs: list[tuple[str, ...]], together: bool) -> None:
    sizes = {"a": 400, "b": 1, "c": 1}  # b alone would have no replica
    wanted = RockPlan()(SimResidency(devices(1), sizes), used(*jobs), NOW)
    assert ("b" in wanted["w00"]) is together


def test_few_places_are_one_cluster() -> None:
    places = devices(11)
    assert clusters(places) == [list(places)]
    assert clusters(()) == []


def test_many_places_are_clustered_by_their_totals() -> None:
    some = devices(14)
    places = tuple(
        replace(place, bytes_per_s=9e9, held={"a": number * 70}) if number % 2 else place
        for number, place in enumerate(some)
    )
    assert clusters(places) == [list(places[0::2]), list(places[1::2])]
