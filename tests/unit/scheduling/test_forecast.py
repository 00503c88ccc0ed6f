"""When jobs will have been computed that no worker has yet."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.scheduling.demand import (
    JobDemand,
    JobFinishEstimate,
    RowShape,
    WorkerEstimate,
    estimate_computed,
)

prospects = st.lists(
    st.builds(WorkerEstimate, st.floats(0, 1e4), st.floats(1, 1e4), st.floats(1, 9)), min_size=1, max_size=8
)


def level(workers: Sequence[WorkerEstimate], ahead: float, rows: float = 1) -> float:
    found = estimate_computed(workers, ahead, rows)
    assert found is not None
    return found.finish_ms


@given(workers=prospects, ahead=st.floats(0, 100), rows=st.integers(1, 10))
def test_all_that_comes_before_and_the_job_itself_fit_below_the_level(
    workers: list[WorkerEstimate], ahead: float, rows: int
) -> None:
    found = estimate_computed(workers, ahead, rows)
    assert found is not None
    for finish_ms, amount, drained in ((found.finish_ms, ahead + rows, 1), (found.alone_ms, rows, 0)):
        room = sum(w.workers * max(0.0, finish_ms - drained * w.drained_ms) / w.row_ms for w in workers)
        assert room >= amount - 1e-6
        assert finish_ms >= min(worker.row_ms for worker in workers)
    assert found.alone_ms <= found.finish_ms + 1e-6


@given(workers=prospects, ahead=st.floats(0, 50), more=st.floats(0, 50))
def test_more_before_it_is_never_earlier_and_one_more_worker_never_later(
    workers: list[WorkerEstimate], ahead: float, more: float
) -> None:
    assert level(workers, ahead + more) >= level(workers, ahead) - 1e-6
    helped = level([*workers, WorkerEstimate(0.0, min(w.row_ms for w in workers))], ahead)
    assert helped <= level(workers, ahead) + 1e-6


def test_one_that_stands_for_several_is_as_good_as_they() -> None:
    several = [WorkerEstimate(10.0, 100.0)] * 3 + [WorkerEstimate(40.0, 50.0)] * 2
    assert level([WorkerEstimate(10.0, 100.0, 3), WorkerEstimate(40.0, 50.0, 2)], 7) == level(several, 7)


def test_idle_workers_share_the_rows() -> None:
    two = [WorkerEstimate(0, 100), WorkerEstimate(50, 100)]
    assert estimate_computed(two, 0, 1) == JobFinishEstimate(100, 100)
    assert estimate_computed([WorkerEstimate(0, 100), WorkerEstimate(1000, 100)], 3, 1) == JobFinishEstimate(
        400, 100
    )
    assert estimate_computed([WorkerEstimate(30, 100)], 1, 1) == JobFinishEstimate(230, 100)
    assert estimate_computed(two, 0, 4) == JobFinishEstimate(225, 200)


def test_nothing_is_guessed() -> None:
    assert estimate_computed([], 0, 1) is None
    assert estimate_computed([WorkerEstimate(0, 0.0)], 0, 1) is None


def test_jobs_are_compared_by_the_tokens_of_all_their_steps() -> None:
    shape = RowShape(text=10, image=100, computed=20, steps=5, sequences=2)
    assert JobDemand("m", "d", (shape, shape)).size == pytest.approx(2 * 30 * 2 * 5)
