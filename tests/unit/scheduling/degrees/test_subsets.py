"""Families of subsets, and placing rows on them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.scheduling.degrees.pool import (
    DEGREES,
    MOST_DEVICES,
    DeviceRequest,
    DeviceSubsets,
    device_subsets,
)

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
