"""Finish times against a run step by step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.scheduling.demand import LEAST, FinishEstimator, RowLoad, WorkerLoad

loads = st.builds(
    RowLoad,
    steps=st.integers(1, 12),
    step_ms=st.floats(0, 50),
    first_ms=st.sampled_from([0.0, 7.5, 90.0]),
    tokens=st.integers(0, 40),
    first_tokens=st.sampled_from([0, 0, 30]),
)
backlogs = st.builds(
    WorkerLoad,
    places=st.integers(1, 6),
    base_ms=st.floats(0, 5),
    running=st.lists(loads, max_size=7).map(tuple),
    waiting=st.lists(loads, max_size=6).map(tuple),
    tokens=st.sampled_from([math.inf, 1, 60, 100]),
)


def joined(backlog: WorkerLoad, rows: Sequence[RowLoad]) -> WorkerLoad:
    return replace(backlog, waiting=(*backlog.waiting, *rows))


def step_by_step(backlog: WorkerLoad) -> list[float]:
    """When each row leaves, by computing every step."""
    rows = (*backlog.running, *backlog.waiting)
    left = [row.steps for row in rows]
    ends, running, waiting = [0.0] * len(rows), list(range(len(backlog.running))), list(range(len(rows)))
    waiting = waiting[len(running) :]
    now_ms = 0.0

    def joins(row: RowLoad) -> bool:
        tokens = sum(rows[i].tokens for i in running) + row.tokens + row.first_tokens
        return not running or (len(running) < backlog.places and tokens <= backlog.tokens)

    while running or waiting:
        while waiting and joins(rows[waiting[0]]):
            running.append(waiting.pop(0))
        firsts = sum(rows[i].first_ms for i in running if left[i] == rows[i].steps)
        now_ms += backlog.base_ms + sum(rows[i].step_ms for i in running) + firsts
        for i in list(running):
            left[i] -= 1
            if not left[i]:
                running.remove(i)
                ends[i] = now_ms
    return ends


@given(backlog=backlogs)
def test_rows_leave_when_a_run_step_by_step_says_so(backlog: WorkerLoad) -> None:
    assert backlog.ends_ms() == pytest.approx(step_by_step(backlog), abs=1e-6)


@given(backlog=backlogs)
def test_a_worker_is_empty_when_its_last_row_leaves(backlog: WorkerLoad) -> None:
    fitting = backlog.running_what_fits((*backlog.running, *backlog.waiting))
    for one in (backlog, fitting):
        assert FinishEstimator(one).drained_ms == pytest.approx(max(one.ends_ms(), default=0.0), abs=1e-6)


@given(backlog=backlogs)
def test_rows_that_may_share_a_step_run_at_once_and_others_wait(backlog: WorkerLoad) -> None:
    rows = (*backlog.running, *backlog.waiting)
    fitting = backlog.running_what_fits(rows)
    assert (*fitting.running, *fitting.waiting) == rows
    waiting = dataclasses.replace(backlog, running=(), waiting=rows)
    assert fitting.ends_ms() == pytest.approx(waiting.ends_ms(), abs=1e-6)


@given(backlog=backlogs, load=loads, count=st.integers(1, 3), others=st.lists(loads, min_size=1, max_size=3))
def test_a_prediction_is_what_becomes_of_the_rows_and_of_all_others(
    backlog: WorkerLoad, load: RowLoad, count: int, others: list[RowLoad]
) -> None:
    """The delay of others is exact where the rows are equal."""
    before, after = step_by_step(backlog), step_by_step(joined(backlog, [load] * count))
    predicted = FinishEstimator(backlog).predict([load] * count)
    assert predicted.finish_ms == pytest.approx(max(after[-count:]), abs=1e-6)
    assert predicted.delay_ms == pytest.approx(sum(after[:-count]) - sum(before), abs=1e-5)
    ends = step_by_step(joined(backlog, [load, *others]))[-1 - len(others) :]
    assert FinishEstimator(backlog).predict([load, *others]).finish_ms == pytest.approx(max(ends), abs=1e-6)


@given(
    rows=st.lists(loads.filter(lambda row: row.step_ms > 0.01), min_size=1, max_size=6),
    places=st.integers(1, 16),
    base_ms=st.floats(0.01, 100),
    slack=st.floats(0.01, 0.5),
)
def test_fewer_rows_than_are_worth_a_step_would_be_slower_by_more_than_the_slack(
    rows: list[RowLoad], places: int, base_ms: float, slack: float
) -> None:
    row_ms = sum(row.step_ms for row in rows) / len(rows)
    worth = WorkerLoad(places, base_ms, tuple(rows)).worth(slack)

    def rate(count: int) -> float:
        return count / (base_ms + count * row_ms)

    enough = (1 - slack) * rate(places)
    assert worth <= places
    assert rate(worth) >= enough * (1 - 1e-9)
    assert worth <= LEAST or rate(worth - 1) <= enough * (1 + 1e-9)


def test_where_little_is_gained_two_rows_are_worth_a_step_and_all_places_where_nothing_is_known() -> None:
    row = RowLoad(steps=10, step_ms=5.0)
    assert WorkerLoad(8, 1.0).worth(0.05) == 8, "no row is here"
    assert WorkerLoad(8, 1.0, (row,)).worth(0.0) == 8, "nothing may be given up"
    assert WorkerLoad(8, 1.0, (row,)).worth(0.05) == 3
    assert WorkerLoad(8, 0.0, (row,)).worth(0.05) == LEAST
    assert WorkerLoad(1, 0.0, (row,)).worth(0.05) == 1
