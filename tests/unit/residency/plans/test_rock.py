"""ROCK's placement, against numbers computed by hand, and what the paper leaves open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from giornata.residency.use_based import AdapterTier, AdapterUsage, ResidencySnapshot, TierKind
from giornata.scheduling import rock
from giornata.scheduling.rock import FULL, RockPlan, replica_count

NOW = 50.0


def devices(count: int, held: Mapping[str, int] | None = None) -> tuple[AdapterTier, ...]:
    return tuple(
        AdapterTier(f"w{number:02d}", TierKind.DEVICE, f"h{number:02d}", 1000, held or {})
        for number in range(count)
    )


def seen(*jobs: tuple[str, ...]) -> AdapterUsage:
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
    uses = seen(*[("a",)] * 3)  # 1.5 * 3 ** 0.6 = 2.9
    wanted = RockPlan(1)(ResidencySnapshot(devices(8), {"a": 100, "b": 100}), uses, NOW)
    assert sum("a" in digests for digests in wanted.values()) == 2


def test_there_are_no_more_replicas_than_places() -> None:
    wanted = RockPlan()(ResidencySnapshot(devices(2), {"a": 100}), seen(*[("a",)] * 50), NOW)
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
        RockPlan(seed)(ResidencySnapshot(places, {"a": 100}), seen(*[("a",)]), NOW) for seed in range(300)
    ]
    share = sum("a" in wanted["w01"] for wanted in drawn) / len(drawn)
    assert share == pytest.approx(0.9, abs=0.06)  # score squared: 9 of 10


def test_the_host_that_has_it_is_nearer() -> None:
    places = devices(2)
    near = AdapterTier("h01", TierKind.HOST, "h01", 1000, {"a": 100})
    drawn = [
        RockPlan(seed)(ResidencySnapshot((*places, near), {"a": 100}), seen(("a",)), NOW)
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
    wanted = RockPlan()(ResidencySnapshot(devices(1), sizes), seen(*jobs), NOW)
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
