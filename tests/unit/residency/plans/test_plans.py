"""Plans of placement: what holds for each, ROCK's against numbers by hand, and the default's."""

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
    TierKind,
    Wanted,
    rank_homes,
    use_plan,
)
from giornata.scheduling import rock
from giornata.scheduling.rock import FULL, RockPlan, replica_count
from giornata_lab.simulation.baselines import PLANNERS

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
        host = f"host-{number}"
        for name, kind in ((host, TierKind.HOST), (f"device-{number}", TierKind.DEVICE)):
            held = {digest: sizes[digest] for digest in sorted(draw(some))}
            places.append(
                AdapterTier(
                    name,
                    kind,
                    host,
                    budget_bytes=draw(st.integers(0, 400)),
                    held=held,
                    bytes_per_s=draw(st.sampled_from((1e7, 1e8, 1e9))),
                    latency_s=draw(st.sampled_from((0.0, 1e-6))),
                )
            )
    asked = st.frozensets(st.sampled_from(ADAPTERS), min_size=1, max_size=3)
    times = st.floats(0.0, 100.0, allow_nan=False)
    jobs = draw(st.lists(st.tuples(times, asked), max_size=60))
    observed = ResidencySnapshot(tuple(places), sizes, pinned=draw(some), registered=draw(some))
    return Drawn(observed, tuple(sorted(jobs, key=lambda job: job[0])))


def applied(observed: ResidencySnapshot, wanted: Wanted) -> ResidencySnapshot:
    """The cluster once every place has what is wanted of it, and nothing else."""
    places = (
        replace(place, held=_sized(observed.sizes, wanted[place.name])) if place.name in wanted else place
        for place in observed.places
    )
    return replace(observed, places=tuple(places))


def _sized(sizes: Mapping[str, int], digests: tuple[str, ...]) -> dict[str, int]:
    return {digest: sizes[digest] for digest in digests}


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


# ROCK's placement, against numbers computed by hand, and what the paper leaves open.


def devices(count: int, held: Mapping[str, int] | None = None) -> tuple[AdapterTier, ...]:
    return tuple(
        AdapterTier(f"w{number:02d}", TierKind.DEVICE, f"h{number:02d}", 1000, held or {})
        for number in range(count)
    )


def used(*jobs: tuple[str, ...]) -> AdapterUsage:
    uses = AdapterUsage()
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
    wanted = RockPlan(1)(ResidencySnapshot(devices(8), {"a": 100, "b": 100}), uses, NOW)
    assert sum("a" in digests for digests in wanted.values()) == 2


def test_there_are_no_more_replicas_than_places() -> None:
    wanted = RockPlan()(ResidencySnapshot(devices(2), {"a": 100}), used(*[("a",)] * 50), NOW)
    assert wanted == {"w00": ("a",), "w01": ("a",)}


def test_uses_before_the_window_do_not_count() -> None:
    uses = AdapterUsage()
    uses.see(["a"], 0.0)
    assert RockPlan()(ResidencySnapshot(devices(2), {"a": 100}), uses, NOW) == {"w00": (), "w01": ()}


def test_beyond_85_percent_the_least_recently_used_goes() -> None:
    held = {"a": 400, "b": 400, "c": 400}
    uses = AdapterUsage()
    for at_s, digest in enumerate("bac"):  # all before the window
        uses.see([digest], float(at_s))
    wanted = RockPlan()(ResidencySnapshot(devices(1, held=held), held), uses, NOW)
    assert wanted == {"w00": ("c", "a")}
    assert 3 * 400 > FULL * 1000 >= 2 * 400


def test_a_place_with_more_bandwidth_is_drawn_more_often() -> None:
    slow, fast = devices(2)
    places = (replace(slow, bytes_per_s=1e9), replace(fast, bytes_per_s=3e9))
    drawn = [
        RockPlan(seed)(ResidencySnapshot(places, {"a": 100}), used(*[("a",)]), NOW) for seed in range(300)
    ]
    share = sum("a" in wanted["w01"] for wanted in drawn) / len(drawn)
    assert share == pytest.approx(0.9, abs=0.06)  # score squared: 9 of 10


def test_the_host_that_has_it_is_nearer() -> None:
    places = devices(2)
    near = AdapterTier("h01", TierKind.HOST, "h01", 1000, {"a": 100})
    drawn = [
        RockPlan(seed)(ResidencySnapshot((*places, near), {"a": 100}), used(("a",)), NOW)
        for seed in range(300)
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
    wanted = RockPlan()(ResidencySnapshot(devices(1), sizes), used(*jobs), NOW)
    assert ("b" in wanted["w00"]) is together


def test_few_places_are_one_cluster() -> None:
    places = devices(11)
    assert rock.clusters(places) == [list(places)]
    assert rock.clusters(()) == []


def test_many_places_are_clustered_by_their_totals() -> None:
    some = devices(14)
    places = tuple(
        replace(place, bytes_per_s=9e9, held={"a": number * 70}) if number % 2 else place
        for number, place in enumerate(some)
    )
    assert rock.clusters(places) == [list(places[0::2]), list(places[1::2])]


# The default plan: nothing goes for what is used less, nothing takes turns, and what is new goes home.


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
