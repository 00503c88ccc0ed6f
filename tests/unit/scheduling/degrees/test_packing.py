"""Frontiers, fitting rows into free device-time, and the subsets of devices that they get."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.scheduling.degrees.plans import (
    DegreeFrontier,
    DegreePlan,
    FreeDeviceSpans,
    PackingOption,
    PackingRequest,
    degree_frontier,
    fit_degrees,
    pack_deadlines,
)
from giornata.scheduling.degrees.pool import (
    DEGREES,
    MOST_DEVICES,
    DeviceRequest,
    DeviceSubsets,
    Times,
    device_subsets,
)
from tests.present import present
from tests.unit.scheduling.degrees.pools import KINDS, LARGE, MIDDLE

DEVICES = 8
FALLING: Times = {1: 1.0, 2: 0.6, 4: 0.5}
"""Steps of 1, 1.2 and 2 device-seconds."""
EMPTY = FreeDeviceSpans.of(0.0, DEVICES, [])
LENGTH = 1e-6
"""Shorter pieces of a plan do not count."""


def wish(
    key: str, due_s: float, steps: float, times: Times = LARGE, *, start_s: float = 0.0, **more: Any
) -> PackingRequest:
    ladder = degree_frontier(times, DEVICES)
    return PackingRequest(key, start_s, due_s, (PackingOption(steps, ladder),), **more)


def pieces(plan: DegreePlan) -> list[tuple[float, float, int]]:
    """From, to and degree, wherever any."""
    edges = sorted({*plan.spans.starts, plan.start_s, plan.cut_s, plan.due_s})
    found = ((a, b, plan.degree((a + b) / 2)) for a, b in pairwise(edges) if b - a > LENGTH)
    return [piece for piece in found if piece[2]]


def test_a_frontier_has_the_degrees_of_least_device_time_mixtures() -> None:
    assert [rung.degree for rung in degree_frontier({1: 1.0, 2: 0.6, 3: 0.59, 4: 0.4, 8: 0.39}, 8).rungs] == [
        1,
        2,
        4,
        8,
    ]
    assert [rung.degree for rung in degree_frontier({1: 1.0, 2: 0.5, 4: 0.6}, 8).rungs] == [2]


def test_degrees_wider_than_the_pool_are_left_out() -> None:
    assert [rung.degree for rung in degree_frontier(FALLING, 3).rungs] == [1, 2]
    with pytest.raises(ValueError, match="a degree of 1 to 3"):
        degree_frontier({4: 1.0}, 3)


def test_a_row_with_time_has_the_cheapest_degree() -> None:
    plan = present(fit_degrees(EMPTY, 0.0, 20.0, 10, degree_frontier(FALLING, DEVICES)))
    assert pieces(plan) == [(0.0, 10.0, 1)]


def test_a_row_with_less_time_has_the_next_rung_first() -> None:
    plan = present(fit_degrees(EMPTY, 0.0, 8.0, 10, degree_frontier(FALLING, DEVICES)))
    assert [degree for *_, degree in pieces(plan)] == [2, 1]
    assert plan.cut_s == pytest.approx(3.0)


def test_a_row_waits_for_devices_that_are_held() -> None:
    spans = FreeDeviceSpans.of(0.0, 2, [(5.0, 2)])
    plan = present(fit_degrees(spans, 0.0, 8.0, 3, degree_frontier(FALLING, 2)))
    assert pieces(plan) == [(5.0, 8.0, 1)]
    assert plan.wider(0.0) == (5.0, 1)
    assert fit_degrees(spans, 0.0, 8.0, 6, degree_frontier(FALLING, 2)) is None


def test_what_a_plan_leaves_is_what_was_free_less_its_degrees() -> None:
    plan = present(
        fit_degrees(FreeDeviceSpans.of(0.0, 8, [(2.0, 7)]), 0.0, 5.0, 4, degree_frontier(FALLING, DEVICES))
    )
    left = plan.left()
    for at_s in (0.5, 1.9, 2.1, 3.0, 4.9, 5.1):
        assert left.at(at_s) == plan.spans.at(at_s) - plan.degree(at_s)


def test_rows_are_packed_by_deadline() -> None:
    assert set(pack_deadlines([wish("b", 3.4, 10), wish("a", 1.7, 10)], EMPTY)) == {"a", "b"}


def test_batch_takes_no_place_of_interactive() -> None:
    large, last = wish("large", 3.4, 20), wish("last", 3.6, 10, batch=True)
    assert set(pack_deadlines([large, last], EMPTY)) == {"large"}


def test_interactive_comes_before_batch_of_any_size() -> None:
    small, large = wish("small", 1.5, 5, batch=True), wish("large", 1.6, 10)
    assert set(pack_deadlines([small, large], EMPTY)) == {"large"}


def test_interactive_comes_before_several_batch_rows_that_leave_it_no_room() -> None:
    batch = [wish(f"b{i}", 1.5, 2.8, batch=True) for i in range(3)]
    large = wish("large", 1.7, 10)
    assert set(pack_deadlines(batch, EMPTY)) == {"b0", "b1", "b2"}
    assert set(pack_deadlines([*batch, large], EMPTY)) == {"large"}
    tiny = wish("tiny", 1.5, 1, batch=True)
    assert set(pack_deadlines([*batch, tiny, wish("large", 2.2, 10)], EMPTY)) == {"large", "tiny"}


def test_rows_that_would_pay_for_a_pause_come_first_where_as_many_are_kept() -> None:
    """Both orders keep both; by deadline the begun row would pause."""
    one = FreeDeviceSpans.of(0.0, 1, [])
    begun, new = wish("begun", 9.0, 3, {1: 1.0}, stays=True), wish("new", 8.0, 3, {1: 1.0})
    assert pack_deadlines([begun, new], one)["begun"].degree(0.0) == 1
    urgent = wish("new", 4.0, 3, {1: 1.0})
    plans = pack_deadlines([begun, urgent], one)
    assert plans["begun"].degree(0.0) == 0
    assert set(plans) == {"begun", "new"}


@st.composite
def wishes(draw: st.DrawFn) -> tuple[FreeDeviceSpans, list[PackingRequest]]:
    devices = draw(st.integers(1, 8))
    held, left = [], devices
    for _ in range(draw(st.integers(0, 4))):
        count = draw(st.integers(0, left))
        held.append((draw(st.floats(0, 3)), count))
        left -= count
    found = []
    for key in range(draw(st.integers(1, 12))):
        ladder: DegreeFrontier = degree_frontier(draw(st.sampled_from(KINDS)), devices)
        start_s, steps = draw(st.sampled_from((0.0, 0.3, 2.0))), draw(st.floats(0.5, 30))
        due_s = start_s + steps * ladder.fastest_s * draw(st.floats(0.5, 8))
        batch, stays = draw(st.booleans()), draw(st.booleans())
        ways = (PackingOption(steps, ladder),)
        found.append(PackingRequest(key, start_s, due_s, ways, batch=batch, stays=stays))
    return FreeDeviceSpans.of(0.0, devices, held), found


@given(wishes())
def test_packing_never_exceeds_capacity_and_makes_all_steps_in_time(
    drawn: tuple[FreeDeviceSpans, Sequence[PackingRequest]],
) -> None:
    spans, asked = drawn
    plans = pack_deadlines(asked, spans)
    for at_s in _midpoints(spans, list(plans.values())):
        assert sum(plan.degree(at_s) for plan in plans.values()) <= spans.at(at_s)
    for each in asked:
        if each.key in plans:
            plan, rates = plans[each.key], {rung.degree: rung.rate for rung in each.ways[0].ladder.rungs}
            made = sum((b - a) * rates[degree] for a, b, degree in pieces(plan))
            assert made == pytest.approx(each.ways[0].steps, abs=1e-3)
            assert all(each.start_s <= a and b <= each.due_s for a, b, _ in pieces(plan))


def _midpoints(spans: FreeDeviceSpans, plans: Sequence[DegreePlan]) -> list[float]:
    edges = {*spans.starts, *(at for plan in plans for at in (plan.start_s, plan.cut_s, plan.due_s))}
    return [(a + b) / 2 for a, b in pairwise(sorted(edges)) if b - a > LENGTH]


@given(wishes())
def test_interactive_rows_are_promised_as_if_there_was_no_batch(
    drawn: tuple[FreeDeviceSpans, Sequence[PackingRequest]],
) -> None:
    """At least one of them is promised, where packing them alone promises any."""
    spans, asked = drawn
    alone = pack_deadlines([each for each in asked if not each.batch and not each.stays], spans)
    mixed = pack_deadlines([each for each in asked if not each.stays], spans)
    batch = {each.key for each in asked if each.batch}
    assert not alone or mixed.keys() - batch


def test_a_step_of_middle_size_takes_a_middle_degree() -> None:
    plan = present(fit_degrees(EMPTY, 0.0, 1.0, 10, degree_frontier(MIDDLE, DEVICES)))
    assert 1 < plan.degree(0.0) < 8


# Families of subsets, and placing rows on them.


ALL = set(DEGREES)
EIGHT = DeviceSubsets(device_subsets(8))


def test_eight_devices_have_aligned_groups_and_those_of_three_and_six() -> None:
    wide = {group for group in device_subsets(8) if len(group) > 1}
    pairs = {(0, 1), (2, 3), (4, 5), (6, 7)}
    fours = {(0, 1, 2, 3), (4, 5, 6, 7)}
    others = {(0, 1, 2), (4, 5, 6), (0, 1, 2, 3, 4, 5), (2, 3, 4, 5, 6, 7), tuple(range(8))}
    assert wide == pairs | fours | others


@pytest.mark.parametrize("devices", range(1, MOST_DEVICES + 1))
def test_no_rank_is_in_more_than_six_groups_and_each_can_compute_alone(devices: int) -> None:
    groups = device_subsets(devices)
    assert len(set(groups)) == len(groups)
    for rank in range(devices):
        assert (rank,) in groups
        assert sum(rank in group for group in groups if len(group) > 1) <= 6
    assert {len(group) for group in groups} == {degree for degree in DEGREES if degree <= devices}
    assert all(list(group) == sorted(group) and group[-1] < devices for group in groups)


@pytest.mark.parametrize("devices", [0, 9])
def test_other_pools_are_refused(devices: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 8 devices; received {devices}"):
        device_subsets(devices)


def test_a_row_keeps_its_devices() -> None:
    seat = DeviceRequest("a", 2, ALL, own=(4, 5))
    assert EIGHT.place([seat], range(8)) == {"a": (4, 5)}


def test_a_row_gets_the_subset_that_leaves_the_widest_one_whole() -> None:
    assert EIGHT.place([DeviceRequest("a", 1, ALL)], {0, 1, 2, 3, 6}) == {"a": (6,)}
    assert EIGHT.place([DeviceRequest("a", 2, ALL)], {0, 1, 4, 5, 6, 7}) == {"a": (0, 1)}


def test_among_equals_a_row_gets_the_subset_that_has_most_of_its_own() -> None:
    assert EIGHT.place([DeviceRequest("a", 4, ALL, own=(4, 5))], range(8)) == {"a": (4, 5, 6, 7)}
    assert EIGHT.place([DeviceRequest("a", 4, ALL, own=(0, 1))], range(8)) == {"a": (0, 1, 2, 3)}


def test_a_degree_of_which_no_subset_is_free_is_narrowed() -> None:
    assert EIGHT.place([DeviceRequest("a", 2, ALL)], {1, 2}) == {"a": (1,)}
    assert EIGHT.place([DeviceRequest("a", 8, {8, 4})], set(range(7))) == {"a": (0, 1, 2, 3)}
    assert EIGHT.place([DeviceRequest("a", 2, {2})], {1, 2}) == {}


def test_wide_rows_are_placed_before_narrow_ones() -> None:
    placed = EIGHT.place([DeviceRequest("one", 1, ALL), DeviceRequest("four", 4, ALL)], {0, 4, 5, 6, 7})
    assert placed == {"four": (4, 5, 6, 7), "one": (0,)}


def test_a_row_that_pays_for_moves_keeps_its_devices_from_wide_ones() -> None:
    narrow, wide = DeviceRequest("one", 1, ALL, own=(4,), pays=True), DeviceRequest("four", 4, ALL)
    assert EIGHT.place([wide, narrow], {0, 4, 5, 6, 7}) == {"one": (4,), "four": (6, 7)}


def test_devices_that_others_wait_for_are_taken_last() -> None:
    assert EIGHT.place([DeviceRequest("a", 1, ALL)], {2, 6}, owned=[(2,)]) == {"a": (6,)}
    assert EIGHT.place([DeviceRequest("a", 1, ALL)], {2, 6}, owned=[(6,)]) == {"a": (2,)}


def test_the_degrees_of_a_pool_are_those_of_the_devices_that_are_left() -> None:
    assert EIGHT.degrees(range(8)) == ALL
    assert EIGHT.degrees(set(range(8)) - {3}) == {1, 2, 3, 4}
    assert EIGHT.degrees(set(range(8)) - {0}) == {1, 2, 3, 4, 6}
    assert EIGHT.degrees({0, 2, 5}) == {1}


@given(
    st.integers(1, 8).flatmap(
        lambda devices: st.tuples(
            st.just(devices),
            st.frozensets(st.integers(0, devices - 1)),
            st.lists(
                st.tuples(st.sampled_from(DEGREES), st.sampled_from(device_subsets(devices)), st.booleans()),
                max_size=5,
            ),
        )
    )
)
def test_rows_are_placed_on_free_groups_of_the_family_that_do_not_overlap(
    drawn: tuple[int, frozenset[int], list[tuple[int, tuple[int, ...], bool]]],
) -> None:
    devices, free, wanted = drawn
    seats = [DeviceRequest(key, degree, ALL, own, pays) for key, (degree, own, pays) in enumerate(wanted)]
    placed = DeviceSubsets(device_subsets(devices)).place(seats, free)
    taken = [device for group in placed.values() for device in group]
    assert len(taken) == len(set(taken))
    assert free.issuperset(taken)
    for seat in seats:
        if seat.key in placed:
            assert placed[seat.key] in device_subsets(devices)
            assert len(placed[seat.key]) <= seat.degree
    if len(placed) < len(seats):
        assert free.issubset(taken), "a row stays without devices though some are free"
