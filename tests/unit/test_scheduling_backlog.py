"""Finish times against a run step by step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.scheduling.backlog import Backlog, Outlook, RowLoad

loads = st.builds(
    RowLoad, steps=st.integers(1, 12), step_ms=st.floats(0, 50), first_ms=st.sampled_from([0.0, 7.5, 90.0])
)
backlogs = st.builds(
    Backlog,
    places=st.integers(1, 6),
    base_ms=st.floats(0, 5),
    running=st.lists(loads, max_size=7).map(tuple),
    waiting=st.lists(loads, max_size=6).map(tuple),
    busy_ms=st.floats(0, 20),
)


def step_by_step(backlog: Backlog) -> list[float]:
    """When each row leaves, by computing every step."""
    rows = (*backlog.running, *backlog.waiting)
    left = [row.steps for row in rows]
    ends, running, waiting = [0.0] * len(rows), list(range(len(backlog.running))), list(range(len(rows)))
    waiting = waiting[len(running) :]
    now_ms = backlog.busy_ms
    while running or waiting:
        while waiting and len(running) < backlog.places:
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
def test_rows_leave_when_a_run_step_by_step_says_so(backlog: Backlog) -> None:
    assert backlog.ends_ms() == pytest.approx(step_by_step(backlog), abs=1e-6)


@given(backlog=backlogs, load=loads, count=st.integers(1, 3))
def test_a_prediction_is_what_becomes_of_the_rows_and_of_all_others(
    backlog: Backlog, load: RowLoad, count: int
) -> None:
    before, after = step_by_step(backlog), step_by_step(backlog.with_rows([load] * count))
    predicted = Outlook(backlog).predict([load] * count)
    assert predicted.finish_ms == pytest.approx(max(after[-count:]), abs=1e-6)
    assert predicted.delay_ms == pytest.approx(sum(after[:-count]) - sum(before), abs=1e-5)


@given(backlog=backlogs, rows=st.lists(loads, min_size=2, max_size=3))
def test_rows_that_differ_are_predicted_too(backlog: Backlog, rows: list[RowLoad]) -> None:
    after = step_by_step(backlog.with_rows(rows))
    assert Outlook(backlog).predict(rows).finish_ms == pytest.approx(max(after[-len(rows) :]), abs=1e-6)


def test_nobody_delays_an_idle_worker() -> None:
    idle = Outlook(Backlog(places=4, base_ms=2.0))
    assert idle.predict([RowLoad(5, 10.0, 30.0)]) == (5 * 12.0 + 30.0, 0.0)
    assert Backlog(places=4, base_ms=2.0).ends_ms() == []
