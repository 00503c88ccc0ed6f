"""When jobs will have been computed that no worker has yet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.scheduling.demand import Demand, RowShape
from giornata.scheduling.forecast import Prospect, finish_ms, size

prospects = st.lists(
    st.builds(Prospect, st.floats(0, 1e4), st.floats(1, 1e4), st.floats(1, 9)), min_size=1, max_size=8
)


@given(workers=prospects, ahead=st.floats(0, 100))
def test_all_that_comes_before_and_the_job_itself_fit_below_the_level(
    workers: list[Prospect], ahead: float
) -> None:
    level = finish_ms(workers, ahead)
    assert level is not None
    computed = sum(w.workers * max(0.0, level - w.drained_ms) / w.job_ms for w in workers)
    assert computed >= ahead + 1 - 1e-6
    assert level >= min(worker.job_ms for worker in workers)


@given(workers=prospects, ahead=st.floats(0, 50), more=st.floats(0, 50))
def test_more_before_it_is_never_earlier_and_one_more_worker_never_later(
    workers: list[Prospect], ahead: float, more: float
) -> None:
    level = finish_ms(workers, ahead) or 0.0
    assert (finish_ms(workers, ahead + more) or 0.0) >= level - 1e-6
    helped = finish_ms([*workers, Prospect(0.0, min(w.job_ms for w in workers))], ahead)
    assert (helped or 0.0) <= level + 1e-6


def test_one_that_stands_for_several_is_as_good_as_they() -> None:
    several = [Prospect(10.0, 100.0)] * 3 + [Prospect(40.0, 50.0)] * 2
    assert finish_ms([Prospect(10.0, 100.0, 3), Prospect(40.0, 50.0, 2)], 7) == finish_ms(several, 7)


def test_an_idle_worker_takes_as_long_as_the_job() -> None:
    assert finish_ms([Prospect(0, 100), Prospect(50, 100)], 0) == 100
    assert finish_ms([Prospect(0, 100), Prospect(1000, 100)], 3) == 400
    assert finish_ms([Prospect(30, 100)], 1) == 230


def test_nothing_is_guessed() -> None:
    assert finish_ms([], 0) is None
    assert finish_ms([Prospect(0, 0.0)], 0) is None


def test_jobs_are_compared_by_the_tokens_of_all_their_steps() -> None:
    shape = RowShape(text=10, image=100, computed=20, steps=5, sequences=2)
    assert size(Demand("m", "d", (shape, shape))) == pytest.approx(2 * 30 * 2 * 5)
