"""Rules of constant degrees."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.scheduling.degrees.pool import PoolDecision
from giornata_lab.simulation.degrees.baselines import FixedDegrees
from tests.unit.scheduling.degrees.pools import (
    LARGE,
    SMALL,
    Moment,
    VirtualPool,
    began,
    check,
    degrees,
    moments,
    row,
)

ALL = frozenset(range(8))


@given(moments(), st.booleans())
def test_every_decision_is_one_that_the_pool_can_carry_out(moment: Moment, by_deadline: bool) -> None:
    rule = FixedDegrees(moment.devices, 1, by_deadline=by_deadline)
    check(moment, rule.decide(moment.now_s, moment.rows, moment.free))


def test_rows_keep_their_devices_to_the_end() -> None:
    pool = VirtualPool(FixedDegrees(8, 4))
    pool.run([row(str(i), 50.0, 6, arrived_s=0.1 * i) for i in range(5)])
    for i in range(5):
        assert pool.degrees_of(str(i)) == [4] * 6
    assert pool.moved == 0


@pytest.mark.parametrize(("by_deadline", "first"), [(False, "early"), (True, "urgent")])
def test_rows_begin_in_order(by_deadline: bool, first: str) -> None:
    rows = [row("urgent", 5.0, arrived_s=1.0), row("early", 9.0, arrived_s=0.0)]
    assert set(began(FixedDegrees(8, 8, by_deadline=by_deadline).decide(2.0, rows, ALL))) == {first}


def test_the_first_that_finds_no_devices_holds_up_all_behind_it() -> None:
    rows = [row("wide", 9.0, size="wide"), row("narrow", 9.0, arrived_s=1.0, size="narrow")]
    held = row("held", 9.0, 0, devices=(0,), until_s=3.0)
    rule = FixedDegrees(8, {"wide": 8, "narrow": 1})
    assert rule.decide(2.0, [*rows, held], ALL - {0}) == PoolDecision()
    assert degrees(rule.decide(2.0, [rows[1], held], ALL - {0})) == {"narrow": 1}


def test_degrees_are_those_of_sizes() -> None:
    rule = FixedDegrees(8, {"large": 4, "small": 2})
    rows = [row("a", left=3, size="large"), row("b", left=3, size="small"), row("c", left=3, size="other")]
    assert degrees(rule.decide(0.0, rows, ALL)) == {"a": 4, "b": 2, "c": 1}


def test_a_row_without_a_time_for_its_degree_has_the_next_narrower() -> None:
    assert degrees(FixedDegrees(8, 4).decide(0.0, [row("a", step_s={1: 1.0, 2: 0.6, 8: 0.3})], ALL)) == {
        "a": 2
    }
    assert degrees(FixedDegrees(8, 2).decide(0.0, [row("a", step_s={4: 0.6, 8: 0.3})], ALL)) == {"a": 4}


def test_template_runs_have_one_device_and_come_last() -> None:
    rows = [row("template", left=3, step_s=SMALL, background=True), row("a", arrived_s=1.0)]
    assert degrees(FixedDegrees(8, 4).decide(2.0, rows, ALL)) == {"a": 4, "template": 1}
    assert degrees(FixedDegrees(1, 1).decide(2.0, rows, {0})) == {"a": 1}


def test_degrees_that_the_pool_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[1, 2, 3, 4\]; received 8"):
        FixedDegrees(4, 8)
    with pytest.raises(ValueError, match="received 5"):
        FixedDegrees(8, {"a": 5})


def test_after_a_loss_rows_go_on_with_fewer() -> None:
    assert degrees(
        FixedDegrees(8, 8).decide(0.0, [row("a", step_s=LARGE, devices=tuple(range(8)))], ALL - {0})
    ) == {"a": 6}
