"""TetriServe's Algorithm 1: allocations and knapsack against brute force, rounds and events on cases made by hand."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from giornata.scheduling.degrees.pool import PoolDecision, PoolRow, StepStart
from giornata_lab.simulation.degrees.rules import (
    DegreeOption,
    EventDrivenRule,
    RoundBasedRule,
    TieBreak,
    knapsack,
    least_device_time,
    placed,
)

TIMES = {1: 1.0, 2: 0.6, 4: 0.4}
ALL = frozenset(range(4))
POWERS = (1, 2, 4, 8)


def row(key: int = 0, due_s: float = 10.0, left: int = 4, **fields: object) -> PoolRow:
    made = PoolRow(key, 0.0, due_s, left, TIMES, TIMES)
    return replace(made, **fields)  # type: ignore[arg-type]  # fields of the row


def degrees_of(begins: Sequence[StepStart]) -> dict[object, tuple[int, int]]:
    return {begin.rows[0]: (len(begin.devices), begin.steps) for begin in begins}


times = st.fixed_dictionaries({k: st.integers(1, 40).map(float) for k in (1, 2, 4, 8)})


@given(times, st.integers(1, 6), st.integers(1, 240).map(float))
def test_an_allocation_takes_the_least_device_time_of_all_that_are_in_time(
    step_s: dict[int, float], left: int, within_s: float
) -> None:
    found = least_device_time(step_s, left, within_s)
    counts = [c for c in product(range(left + 1), repeat=len(step_s)) if sum(c) == left]

    def spent(chosen: Sequence[tuple[int, int]]) -> tuple[float, float]:
        return sum(n * step_s[k] for n, k in chosen), sum(n * k * step_s[k] for n, k in chosen)

    mixtures = [spent(list(zip(c, step_s, strict=True))) for c in counts]
    able = [area for seconds, area in mixtures if seconds <= within_s]
    assert bool(found) == bool(able)
    if found:
        seconds, area = spent(found)
        assert seconds <= within_s + 1e-6
        # whole steps of two neighbours: at most the difference of one step above any mixture's
        slack = max(k * t for k, t in step_s.items()) - min(k * t for k, t in step_s.items())
        assert area <= min(able) + slack + 1e-6


options = st.lists(
    st.builds(DegreeOption, st.sampled_from([1, 2, 4]), st.integers(0, 8).map(lambda eighths: eighths / 8)),
    max_size=2,
).map(lambda more: [DegreeOption(0, 0.0), *more])


@given(st.lists(options, max_size=6), st.integers(0, 8))
def test_the_knapsack_is_as_good_as_every_choice(rows: list[list[DegreeOption]], free: int) -> None:
    able = [
        (sum(o.worth for o in choice), -sum(o.degree for o in choice))
        for choice in product(*rows)
        if sum(o.degree for o in choice) <= free
    ]
    chosen = knapsack(rows, free)
    worth = sum(max(o.worth for o in mine if o.degree == k) for mine, k in zip(rows, chosen, strict=True))
    assert (worth, -sum(chosen)) == max(able)


def test_rows_of_as_many_devices_as_before_keep_them() -> None:
    rows = [row(0, devices=(2, 3)), row(1), row(2, devices=(1,))]
    chosen: dict[Hashable, int] = {0: 2, 1: 1, 2: 1}
    assert placed(rows, chosen, ALL) == (
        StepStart((0,), (2, 3)),
        StepStart((1,), (0,)),
        StepStart((2,), (1,)),
    )


def rounds(length_s: float = 1.0, ties: TieBreak = TieBreak.EAGER) -> RoundBasedRule:
    return RoundBasedRule(length_s, 4, ties)


NARROW = {1: 1.0}
"""Of rows that nothing widens."""


def test_a_round_gives_whole_steps_and_asks_to_be_woken_at_its_end() -> None:
    decision = rounds(2.0).decide(5.0, [row(due_s=30.0, step_s=NARROW)], ALL)
    assert degrees_of(decision.begins) == {0: (1, 2)}
    assert decision.wake_s == 7.0


def test_an_arrival_waits_for_the_round_unless_no_row_has_begun() -> None:
    rule = rounds(2.0)
    rule.decide(0.0, [row()], ALL)
    running = row(devices=(0,), until_s=2.0)
    assert rule.decide(1.0, [running, row(1)], ALL - {0}) == PoolDecision(wake_s=2.0)
    decision = rule.decide(1.5, [row(1)], ALL)
    assert (len(decision.begins), decision.wake_s) == (1, 3.5)


def test_a_row_gets_the_degree_that_its_deadline_needs() -> None:
    assert degrees_of(rounds(0.4).decide(0.0, [row(due_s=1.7)], ALL).begins) == {0: (4, 1)}


def test_idle_devices_go_to_rows_that_were_not_chosen_and_then_widen() -> None:
    calm = [row(key, due_s=100.0, step_s=NARROW) for key in range(2)]
    assert degrees_of(rounds(ties=TieBreak.FEWEST).decide(0.0, calm, ALL).begins) == {0: (1, 1), 1: (1, 1)}
    widened = rounds(1.25).decide(0.0, [row(due_s=100.0)], ALL).begins
    assert degrees_of(widened) == {0: (4, 3)}


def test_a_round_reckons_with_what_whole_steps_leave_unused() -> None:
    """In 1.5 s one device makes one step of 1 s: four take 6 s, and so 5 s need more devices."""
    options = rounds(1.5)._options(row(due_s=5.0), 0.0)
    assert [option.degree for option in options] == [0, 2]


def test_events_begin_one_step_of_what_deadlines_need_and_then_widen() -> None:
    begins = EventDrivenRule().decide(0.0, [row(0, due_s=1.7), row(1, due_s=1.7)], ALL).begins
    assert list(degrees_of(begins).values()) == [(4, 1)], "one of the two can be in time"
    assert degrees_of(EventDrivenRule().decide(0.0, [row(0, due_s=100.0)], ALL).begins) == {0: (4, 1)}
