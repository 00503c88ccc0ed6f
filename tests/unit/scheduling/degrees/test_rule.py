"""The rule, step by step, each of its switches, and rows that share a step."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given

from giornata.scheduling.degrees.pool import PoolDecision, PoolRow, Times
from giornata.scheduling.degrees.rule import ReplanningOptions, ReplanningRule
from giornata.wire.jobs import Priority
from tests.unit.scheduling.degrees.pools import (
    LARGE,
    SMALL,
    Moment,
    VirtualPool,
    at_once,
    began,
    check,
    degrees,
    masked,
    moments,
    row,
)

ALL = frozenset(range(8))
NARROW = ReplanningOptions(widens=False)
"""Degrees as planned."""
OFF = ReplanningOptions(waits=False, widens=False, shares=False, ages_s=math.inf, cap_s=math.inf)
SLOW_ALONE: Times = {1: 3.0, 8: 0.6}


def decide(
    *rows: PoolRow, switches: ReplanningOptions | None = None, free: frozenset[int] = ALL, now_s: float = 0.0
) -> PoolDecision:
    return ReplanningRule(8, switches).decide(now_s, rows, free)


def in_flight(key: str, devices: tuple[int, ...], until_s: float, left: int = 0, **more: Any) -> PoolRow:
    return row(key, 99.0, left, devices=devices, until_s=until_s, **more)


@pytest.mark.parametrize("switches", [ReplanningOptions(), OFF], ids=["on", "off"])
@given(moments())
def test_every_decision_is_one_that_the_pool_can_carry_out_whatever_came_before(
    switches: ReplanningOptions, moment: Moment
) -> None:
    for together in (None, at_once):
        rule = ReplanningRule(moment.devices, switches, together=together)
        decision = rule.decide(moment.now_s, moment.rows, moment.free)
        check(moment, decision)
        rule.decide(moment.now_s + 1, moment.rows[1:], frozenset())
        assert rule.decide(moment.now_s, moment.rows, moment.free) == decision


# 1. Free devices over time


def test_devices_that_steps_hold_are_planned_with_when_these_end() -> None:
    """Ten steps on four devices take 3.1 s: they are in time where the other four join at 0.6 s."""
    held = in_flight("held", (4, 5, 6, 7), 0.6)
    free = frozenset({0, 1, 2, 3})
    assert degrees(decide(row("a", 1.9, 10), held, switches=NARROW, free=free)) == {"a": 4}
    assert decide(row("a", 1.8, 10), held, free=free).begins == ()


def test_lost_devices_are_not_planned_with() -> None:
    """Eight devices would be in time, seven have no group of more than four."""
    alive = frozenset(range(8)) - {3}
    begun = degrees(decide(row("a", 1.6, 10), row("b", 4.0, 10), switches=NARROW, free=alive))
    assert begun["b"] == 4


# 2. Rows by deadline, with the least device-time


@pytest.mark.parametrize(("due_s", "degree"), [(13.0, 1), (6.3, 2), (3.2, 4), (1.7, 8)])
def test_a_row_has_the_least_degree_that_is_in_time(due_s: float, degree: int) -> None:
    assert degrees(decide(row("a", due_s, 10), switches=NARROW)) == {"a": degree}


def test_an_interactive_row_keeps_its_place_before_batch() -> None:
    large, small = row("large", 3.0, 18), row("small", 3.1, 12, priority=Priority.BATCH)
    assert "large" in degrees(decide(large, small, switches=NARROW))


def test_degrees_that_are_not_wanted_are_not_used() -> None:
    assert degrees(decide(row("a", 3.5, 10), switches=NARROW)) == {"a": 4}
    few = ReplanningOptions(widens=False, degrees=(1, 2, 8))
    assert degrees(decide(row("a", 3.5, 10), switches=few)) == {"a": 8}
    with pytest.raises(ValueError, match="2 devices need one of the degrees"):
        ReplanningRule(2, ReplanningOptions(degrees=(4,)))


def test_a_degree_that_the_profile_lacks_is_not_used() -> None:
    assert degrees(decide(row("a", 3.0, 5, {1: 1.0, 8: 0.3}))) == {"a": 8}
    assert decide(row("a", 3.0, 5, {5: 1.0})) == PoolDecision()


# 3. Beginning what is planned, or waiting


def test_a_row_waits_where_a_wider_degree_ends_its_step_sooner() -> None:
    """Alone it takes 3 s; at 0.1 s it gets eight devices, and 0.6 s."""
    held = in_flight("held", (1, 2, 3, 4, 5, 6, 7), 0.1)
    rows = (row("a", 2.0, 3, SLOW_ALONE), held)
    assert decide(*rows, free=frozenset({0})).begins == ()
    due = (row("a", 6.0, 4, SLOW_ALONE), held)
    assert decide(*due, free=frozenset({0})).begins == ()
    assert degrees(decide(*due, free=frozenset({0}), switches=ReplanningOptions(waits=False))) == {"a": 1}


def test_others_do_not_take_the_devices_that_a_row_waits_for() -> None:
    held = in_flight("held", (1, 2, 3, 4, 5, 6, 7), 0.1)
    waits, late = row("a", 6.0, 4, SLOW_ALONE), row("late", 0.1, 9, {1: 0.2})
    assert decide(waits, late, held, free=frozenset({0})).begins == ()
    quick = row("late", 0.1, 9, {1: 0.05})
    assert degrees(decide(waits, quick, held, free=frozenset({0}))) == {"late": 1}


# 4. Widening


def test_idle_devices_widen_promised_rows_by_gain_for_a_device() -> None:
    begun = degrees(decide(row("linear", 99.0, 10), row("small", 99.0, 10, SMALL)))
    assert begun["linear"] > begun["small"]
    assert degrees(decide(row("linear", 99.0, 10), row("small", 99.0, 10, SMALL), switches=NARROW)) == {
        "linear": 1,
        "small": 1,
    }


def test_a_row_alone_has_the_whole_pool() -> None:
    assert degrees(decide(row("a", 99.0, 10))) == {"a": 8}


# 5. Late rows


def test_late_rows_begin_side_by_side_with_the_least_work_first() -> None:
    few, many = row("few", 0.1, 2, {1: 0.2, 2: 0.15}), row("many", 0.1, 9, {1: 0.2, 2: 0.15})
    assert degrees(decide(many, few)) == {"few": 2, "many": 2}
    assert degrees(decide(many, few, free=frozenset({0, 1}))) == {"few": 2}


def test_late_rows_have_short_steps_where_a_degree_allows() -> None:
    """Eight devices make a step of 0.15 s, three one of 0.4 s."""
    held = in_flight("held", (3, 4, 5, 6, 7), 5.0)
    late, free = row("late", 0.1, 9), frozenset({0, 1, 2})
    assert decide(late, held, free=free).begins == ()
    assert degrees(decide(late, held, free=free, switches=ReplanningOptions(cap_s=math.inf))) == {"late": 3}
    slow = row("late", 0.1, 9, {1: 3.0})
    assert degrees(decide(slow, held, free=free)) == {"late": 1}


def test_late_rows_take_what_promised_ones_leave() -> None:
    promised, late = row("promised", 3.1, 10), row("late", 0.1, 5, SMALL)
    assert degrees(decide(promised, late)) == {"promised": 8}
    assert degrees(decide(promised, late, switches=NARROW)) == {"promised": 4, "late": 4}


def test_an_old_row_comes_before_widening() -> None:
    promised, late = row("promised", 50.0, 10), row("late", 0.1, 5, SMALL)
    assert degrees(decide(promised, late, now_s=29.0)) == {"promised": 8}
    assert degrees(decide(promised, late, now_s=31.0))["late"] > 1
    assert degrees(decide(promised, late, now_s=31.0, switches=ReplanningOptions(ages_s=math.inf))) == {
        "promised": 8
    }


def test_a_row_that_is_twice_as_old_may_have_a_long_step() -> None:
    held = in_flight("held", (1, 2, 3, 4, 5, 6, 7), 99.0)
    late = row("late", 10.1, 5, arrived_s=10.0)
    assert decide(late, held, now_s=69.0, free=frozenset({0})).begins == ()
    assert degrees(decide(late, held, now_s=71.0, free=frozenset({0}))) == {"late": 1}


def test_no_row_starves() -> None:
    """Promised rows keep coming, and would take all that is idle."""
    stream = [row(f"p{i}", i * 1.25 + 60, 8, arrived_s=i * 1.25) for i in range(80)]
    others = [
        row("late", 0.5, 20),
        row("line", left=8),
        row("template", left=20, step_s=SMALL, background=True),
    ]
    young = VirtualPool(ReplanningRule(8)).run([*stream, *others])
    never = VirtualPool(ReplanningRule(8, ReplanningOptions(ages_s=math.inf))).run([*stream, *others])
    assert len(young) == len(never) == 83
    last_s = max(young.values())
    for key in ("late", "line", "template"):
        assert young[key] < 0.8 * last_s < never[key]


# Rows without deadline, and templates


def test_rows_without_deadline_begin_in_the_lines_order() -> None:
    first, second = row("first", place=1.0, arrived_s=-1), row("second", place=0.5)
    held = row("held", left=0, devices=(1, 2, 3, 4, 5, 6, 7), until_s=9.0)
    assert degrees(decide(first, second, held, free=frozenset({0}))) == {"second": 1}


def test_rows_without_deadline_share_the_pool_and_widen() -> None:
    assert degrees(decide(row("a", left=5), row("b", left=5))) == {"a": 4, "b": 4}
    assert degrees(decide(row("a", left=5), row("b", left=5), switches=NARROW)) == {"a": 1, "b": 1}


def test_rows_without_deadline_follow_promised_ones() -> None:
    assert degrees(decide(row("line", left=5), row("promised", 99.0, 5))) == {"promised": 8}


def test_template_runs_come_last_and_have_one_device() -> None:
    template, line = row("template", left=5, background=True), row("line", left=5, step_s={1: 0.1})
    assert degrees(decide(template, line)) == {"line": 1, "template": 1}
    held = in_flight("held", (1, 2, 3, 4, 5, 6, 7), 9.0)
    assert degrees(decide(template, line, held, free=frozenset({0}))) == {"line": 1}


# Masked rows


def test_planning_counts_what_the_first_step_of_a_masked_row_takes() -> None:
    """Ten steps of 0.03 s are in time, and with 0.3 s of a first one are not."""
    one = ReplanningOptions(widens=False, degrees=(1,))
    assert VirtualPool(ReplanningRule(8, one)).run([masked("a", 0.6, 10)])["a"] == pytest.approx(0.57)
    small, masked_row = row("b", 0.4, 10, SMALL), masked("a", 0.4, 10)
    held = in_flight("held", (1, 2, 3, 4, 5, 6, 7), 9.0)
    assert degrees(decide(small, masked_row, held, free=frozenset({0}), switches=one)) == {"b": 1}


def test_a_begun_masked_row_keeps_its_devices_and_is_not_widened() -> None:
    assert began(decide(masked("a", 9.0, 10, (5,)))) == {"a": (5,)}
    assert degrees(decide(row("a", 9.0, 10, SMALL, devices=(5,)))) == {"a": 8}


def test_a_masked_row_moves_where_its_devices_would_be_late() -> None:
    assert len(began(decide(masked("a", 0.9, 30, (5,)), switches=NARROW))["a"]) == 1
    moved = {degree: 1.1 * seconds for degree, seconds in LARGE.items()}
    assert degrees(decide(row("a", 9.6, 30, LARGE, moved, devices=(5,)), switches=NARROW)) == {"a": 4}


def test_a_masked_row_waits_for_its_devices_rather_than_move() -> None:
    held = in_flight("held", (5,), 0.02)
    assert decide(masked("a", 5.0, 30, (5,)), held, free=ALL - {5}).begins == ()
    long = row("held", 99.0, 0, devices=(5,), until_s=4.5)
    assert degrees(decide(masked("a", 5.0, 30, (5,)), long, free=ALL - {5}, switches=NARROW)) == {"a": 1}


def test_devices_of_a_step_that_is_overdue_are_not_free() -> None:
    overdue = in_flight("held", (5,), 0.9)
    assert decide(masked("a", 5.0, 30, (5,)), overdue, free=ALL - {5}, now_s=1.0).begins == ()
    wide = row("a", 2.9, 10)
    late = in_flight("held", (0, 1, 2, 3), 0.9)
    assert degrees(
        decide(wide, late, free=ALL - {0, 1, 2, 3}, now_s=1.0, switches=ReplanningOptions(waits=False))
    ) == {"a": 4}


def test_a_new_row_leaves_a_begun_masked_one_its_devices() -> None:
    one = ReplanningRule(1)
    begun, new = masked("begun", 9.0, 10, (0,)), masked("new", 5.0, 10)
    assert began(one.decide(0.0, [begun, new], {0})) == {"begun": (0,)}
    urgent = masked("new", 0.65, 10)
    assert began(one.decide(0.0, [begun, urgent], {0})) == {"new": (0,)}


def test_a_new_row_takes_no_device_that_a_masked_one_waits_for() -> None:
    waits, held = masked("waits", 5.0, 30, (0, 1)), in_flight("held", (1,), 0.02)
    rows = [waits, held, row("new", 5.0, step_s={1: 0.5})]
    assert began(ReplanningRule(3).decide(0.0, rows, frozenset({0, 2}))) == {"new": (2,)}


def test_masked_rows_hardly_move_under_load() -> None:
    pool = VirtualPool(ReplanningRule(8))
    rows = [masked(f"m{i}", i * 0.1 + 4, 20, arrived_s=i * 0.1) for i in range(80)]
    ends = pool.run(rows)
    assert all(ends[each.key] <= each.due_s for each in rows)
    assert pool.moved < 0.005 * len(pool.steps)


# Rows that share a step.


MOVED = {degree: 10 * seconds for degree, seconds in SMALL.items()}


def decide_sharing(
    *rows: PoolRow, devices: int = 1, switches: ReplanningOptions | None = None
) -> PoolDecision:
    busy = {device for each in rows if each.until_s is not None for device in each.devices}
    return ReplanningRule(devices, switches, together=at_once).decide(0.0, rows, set(range(devices)) - busy)


def groups(decision: PoolDecision) -> set[frozenset[object]]:
    return {frozenset(begin.rows) for begin in decision.begins}


def small(key: str, due_s: float = 9.0, left: int = 10, **more: Any) -> PoolRow:
    return row(key, due_s, left, SMALL, **more)


def test_rows_that_would_wait_share_the_step_that_begins() -> None:
    assert groups(decide_sharing(small("a"), small("b"))) == {frozenset("ab")}
    assert len(groups(decide_sharing(small("a"), small("b"), switches=ReplanningOptions(shares=False)))) == 1
    assert groups(decide_sharing(small("a"), small("b"), devices=2)) == {frozenset("a"), frozenset("b")}


def test_rows_that_may_not_share_do_not() -> None:
    assert groups(decide_sharing(small("a", size=1), small("b", 8.0, size=2))) == {frozenset("b")}


def test_a_row_joins_only_where_all_deadlines_still_hold() -> None:
    """Three rows in a step of 0.045 s: ten of these take 0.45 s."""
    assert groups(decide_sharing(small("a", 0.46), small("b"), small("c"))) == {frozenset("abc")}
    assert groups(decide_sharing(small("a", 0.44), small("b"), small("c"))) == {frozenset("ab")}


def test_joined_steps_stay_short() -> None:
    rows = [small("a"), small("b"), small("c")]
    assert groups(decide_sharing(*rows, switches=ReplanningOptions(cap_s=0.04))) == {frozenset("ab")}
    assert groups(decide_sharing(*rows, switches=ReplanningOptions(cap_s=math.inf))) == {frozenset("abc")}


def test_a_row_that_pays_for_moves_joins_on_its_own_devices_alone() -> None:
    own = masked("own", 9.0, 10, (0,))
    assert groups(decide_sharing(masked("a", 8.0, 10, (0,)), own)) == {frozenset(("a", "own"))}
    other = masked("other", 9.0, 10, (1,))
    held = row("held", 99.0, 0, devices=(1,), until_s=0.01)
    assert groups(decide_sharing(masked("a", 8.0, 10, (0,)), other, held, devices=2)) == {frozenset("a")}
    assert groups(decide_sharing(masked("a", 8.0, 10, (0,)), masked("new", 9.0, 10))) == {frozenset("a")}


def test_without_deadlines_rows_that_pay_begin_together() -> None:
    cheap = {degree: 1.2 * seconds for degree, seconds in SMALL.items()}
    rows = [row(key, left=10, step_s=SMALL, moved_s=cheap) for key in "ab"]
    assert groups(decide_sharing(*rows)) == {frozenset("ab")}
    due = [row("a", 9.0, 10, SMALL, cheap), row("b", left=10, step_s=SMALL, moved_s=cheap)]
    assert groups(decide_sharing(*due)) == {frozenset("a")}


def test_template_runs_share_nothing() -> None:
    template = row("template", left=5, step_s=SMALL, background=True)
    assert groups(decide_sharing(template, row("line", left=5, step_s=SMALL))) == {frozenset(["line"])}
    assert groups(decide_sharing(template, row("other", left=5, step_s=SMALL, background=True))) == {
        frozenset(["template"])
    }


def test_sharing_keeps_more_deadlines_under_load() -> None:
    rows = [small(f"s{i}", 0.01 * i + 1, 10, arrived_s=0.01 * i) for i in range(60)]

    def kept(*, shares: bool) -> int:
        pool = VirtualPool(ReplanningRule(2, ReplanningOptions(shares=shares), together=at_once), 2)
        ends = pool.run(rows)
        return sum(ends[each.key] <= each.due_s for each in rows)

    assert kept(shares=True) > 1.2 * kept(shares=False)
