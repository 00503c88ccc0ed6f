"""Rows that share a step."""

from __future__ import annotations

import math
from typing import Any

from giornata.scheduling.degrees.pool import PoolDecision, PoolRow
from giornata.scheduling.degrees.rule import ReplanningOptions, ReplanningRule
from tests.unit.scheduling.degrees.pools import SMALL, VirtualPool, at_once, masked, row

MOVED = {degree: 10 * seconds for degree, seconds in SMALL.items()}


def decide(*rows: PoolRow, devices: int = 1, switches: ReplanningOptions | None = None) -> PoolDecision:
    busy = {device for each in rows if each.until_s is not None for device in each.devices}
    return ReplanningRule(devices, switches, together=at_once).decide(0.0, rows, set(range(devices)) - busy)


def groups(decision: PoolDecision) -> set[frozenset[object]]:
    return {frozenset(begin.rows) for begin in decision.begins}


def small(key: str, due_s: float = 9.0, left: int = 10, **more: Any) -> PoolRow:
    return row(key, due_s, left, SMALL, **more)


def test_rows_that_would_wait_share_the_step_that_begins() -> None:
    assert groups(decide(small("a"), small("b"))) == {frozenset("ab")}
    assert len(groups(decide(small("a"), small("b"), switches=ReplanningOptions(shares=False)))) == 1
    assert groups(decide(small("a"), small("b"), devices=2)) == {frozenset("a"), frozenset("b")}


def test_rows_that_may_not_share_do_not() -> None:
    assert groups(decide(small("a", size=1), small("b", 8.0, size=2))) == {frozenset("b")}


def test_a_row_joins_only_where_all_deadlines_still_hold() -> None:
    """Three rows in a step of 0.045 s: ten of these take 0.45 s."""
    assert groups(decide(small("a", 0.46), small("b"), small("c"))) == {frozenset("abc")}
    assert groups(decide(small("a", 0.44), small("b"), small("c"))) == {frozenset("ab")}


def test_joined_steps_stay_short() -> None:
    rows = [small("a"), small("b"), small("c")]
    assert groups(decide(*rows, switches=ReplanningOptions(cap_s=0.04))) == {frozenset("ab")}
    assert groups(decide(*rows, switches=ReplanningOptions(cap_s=math.inf))) == {frozenset("abc")}


def test_a_row_that_pays_for_moves_joins_on_its_own_devices_alone() -> None:
    own = masked("own", 9.0, 10, (0,))
    assert groups(decide(masked("a", 8.0, 10, (0,)), own)) == {frozenset(("a", "own"))}
    other = masked("other", 9.0, 10, (1,))
    held = row("held", 99.0, 0, devices=(1,), until_s=0.01)
    assert groups(decide(masked("a", 8.0, 10, (0,)), other, held, devices=2)) == {frozenset("a")}
    assert groups(decide(masked("a", 8.0, 10, (0,)), masked("new", 9.0, 10))) == {frozenset("a")}


def test_without_deadlines_rows_that_pay_begin_together() -> None:
    cheap = {degree: 1.2 * seconds for degree, seconds in SMALL.items()}
    rows = [row(key, left=10, step_s=SMALL, moved_s=cheap) for key in "ab"]
    assert groups(decide(*rows)) == {frozenset("ab")}
    due = [row("a", 9.0, 10, SMALL, cheap), row("b", left=10, step_s=SMALL, moved_s=cheap)]
    assert groups(decide(*due)) == {frozenset("a")}


def test_template_runs_share_nothing() -> None:
    template = row("template", left=5, step_s=SMALL, background=True)
    assert groups(decide(template, row("line", left=5, step_s=SMALL))) == {frozenset(["line"])}
    assert groups(decide(template, row("other", left=5, step_s=SMALL, background=True))) == {
        frozenset(["template"])
    }


def test_sharing_keeps_more_deadlines_under_load() -> None:
    rows = [small(f"s{i}", 0.01 * i + 1, 10, arrived_s=0.01 * i) for i in range(60)]

    def kept(*, shares: bool) -> int:
        pool = VirtualPool(ReplanningRule(2, ReplanningOptions(shares=shares), together=at_once), 2)
        ends = pool.run(rows)
        return sum(ends[each.key] <= each.due_s for each in rows)

    assert kept(shares=True) > 1.2 * kept(shares=False)
