"""Rules of constant degrees."""

from __future__ import annotations

from giornata.scheduling.degrees.pool import PoolDecision, StepStart
from giornata_lab.simulation.degrees.rules import FixedDegrees
from tests.unit.scheduling.degrees.pools import began, degrees, row

ALL = frozenset(range(8))


def test_a_row_begins_all_its_steps_on_its_devices() -> None:
    decision = FixedDegrees(4).decide(0.0, [row("a", 50.0, 6), row("b", 50.0, 5), row("c", 50.0)], ALL)
    assert decision.begins == (StepStart(("a",), (0, 1, 2, 3), 6), StepStart(("b",), (4, 5, 6, 7), 5))


def test_rows_begin_in_the_order_of_their_arrival() -> None:
    rows = [row("urgent", 5.0, arrived_s=1.0), row("early", 9.0, arrived_s=0.0)]
    assert set(began(FixedDegrees(8).decide(2.0, rows, ALL))) == {"early"}


def test_the_first_that_finds_no_devices_holds_up_all_behind_it() -> None:
    rows = [row("wide", 9.0, size="wide"), row("narrow", 9.0, arrived_s=1.0, size="narrow")]
    held = row("held", 9.0, 0, devices=(0,), until_s=3.0)
    rule = FixedDegrees({"wide": 8, "narrow": 1})
    assert rule.decide(2.0, [*rows, held], ALL - {0}) == PoolDecision()
    assert degrees(rule.decide(2.0, [rows[1], held], ALL - {0})) == {"narrow": 1}


def test_degrees_are_those_of_sizes() -> None:
    rule = FixedDegrees({"large": 4, "small": 2})
    rows = [row("a", left=3, size="large"), row("b", left=3, size="small")]
    assert degrees(rule.decide(0.0, rows, ALL)) == {"a": 4, "b": 2}
