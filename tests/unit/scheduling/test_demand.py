"""What rows are expected to cost, against the sum over their steps, and when jobs that wait will be computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from giornata.planning.cost_model import StepCosts
from giornata.scheduling.demand import (
    JobDemand,
    JobFinishEstimate,
    RowShape,
    StepTimeModel,
    WorkerEstimate,
    estimate_computed,
)
from giornata.wire.values import BlockMode
from giornata_lab.bench.systems.networks import PLAIN_4

COSTS = StepCosts((5.0, 0.1, 0.2, 0.001, 0.0, 0.0))
PACE = StepTimeModel(COSTS, PLAIN_4, renewed_every=7)


@example(steps=2, every=1, sequences=1)  # the fewest steps behind the first
@given(steps=st.integers(1, 60), every=st.integers(1, 20), sequences=st.integers(1, 2))
def test_a_row_that_renews_costs_what_its_steps_do(steps: int, every: int, sequences: int) -> None:
    shape = RowShape(10, 100, 20, steps, sequences)
    load = shape.load(PACE, reuses=False, renewed_every=every)
    modes = [BlockMode.KV if step % every else BlockMode.FULL for step in range(steps)]
    assert load.work_ms == pytest.approx(sum(PACE.row_ms(shape, mode) for mode in modes))
    assert load.step_ms + load.first_ms == pytest.approx(PACE.row_ms(shape, BlockMode.FULL))


def test_a_row_on_its_way_renews_one_step_in_so_many() -> None:
    shape = RowShape(10, 100, 20, 14, begun=True)
    load = shape.load(PACE, reuses=False, renewed_every=7)
    full, masked = (PACE.row_ms(shape, mode) for mode in (BlockMode.FULL, BlockMode.KV))
    assert load.step_ms == pytest.approx(masked + (full - masked) / 7)
    assert load.first_ms == 0.0
    assert load.tokens == 30 + round(80 / 7)


@pytest.mark.parametrize("renews", [False, True])
def test_only_a_miss_of_an_edit_that_may_renew_is_spread(renews: bool) -> None:
    shape = RowShape(10, 100, 20, 14)
    asked = JobDemand("m", "d", (shape,), template="t", renews=renews)
    (miss,), (hit,) = asked.loads(PACE, reuses=False), asked.loads(PACE, reuses=True)
    assert hit == shape.load(PACE, reuses=True)
    assert miss == shape.load(PACE, reuses=False, renewed_every=5 if renews else 0)  # three of 14 steps
    assert hit.work_ms < miss.work_ms


@given(
    steps=st.integers(1, 60), every=st.integers(0, 20), sequences=st.integers(1, 2), padding=st.integers(0, 9)
)
def test_a_worker_that_keeps_padding_computes_it_in_steps_in_full(
    steps: int, every: int, sequences: int, padding: int
) -> None:
    """Those of the first step, and of renewals where there is no template; another worker computes it always."""
    keeping = replace(PACE, keeps_padding=True)
    shape = RowShape(10, 100, 20, steps, sequences, padding=padding)
    whole = replace(shape, padding=0)
    load = shape.load(keeping, reuses=not every, renewed_every=every)
    in_full = [step == 0 or bool(every and step % every == 0) for step in range(steps)]
    full, masked = PACE.row_ms(whole, BlockMode.FULL), PACE.row_ms(shape, BlockMode.KV)
    assert load.work_ms == pytest.approx(sum(full if one else masked for one in in_full))
    if not every:
        assert load.tokens == sequences * (30 - padding)
        assert load.tokens + load.first_tokens == sequences * 110
    assert shape.load(PACE, reuses=not every, renewed_every=every) == whole.load(
        PACE, reuses=not every, renewed_every=every
    )


@given(steps=st.integers(1, 60), reuses=st.booleans(), sequences=st.integers(1, 2), prefix=st.integers(1, 90))
def test_a_prefix_is_computed_in_the_first_step_and_attended_to_in_each(
    steps: int, reuses: bool, sequences: int, prefix: int
) -> None:
    shape = RowShape(10, 100, 20, steps, sequences, prefix=prefix)
    load = shape.load(PACE, reuses=reuses)
    joining = PACE.row_ms(RowShape(0, prefix, prefix, 1, sequences), BlockMode.FULL)
    modes = [BlockMode.KV if reuses and step else BlockMode.FULL for step in range(steps)]
    assert load.work_ms == pytest.approx(joining + sum(PACE.row_ms(shape, mode) for mode in modes))
    assert load.tokens + load.first_tokens == sequences * (110 + prefix)
    without = replace(shape, prefix=0)
    pairs = shape.pairs(BlockMode.FULL) - without.pairs(BlockMode.FULL)
    assert pairs == 110 * prefix
    begun = replace(shape, begun=True).load(PACE, reuses=reuses)
    assert (begun.first_ms, begun.first_tokens) == (0.0, 0)


def test_what_saves_nothing_is_computed_in_full() -> None:
    same = StepTimeModel(StepCosts((1.0, 0.0, 0.0, 0.0, 0.0, 0.0)), renewed_every=7)
    shape = RowShape(10, 100, 20, 14)
    assert shape.load(same, reuses=False, renewed_every=7) == shape.load(same, reuses=False)
    whole = RowShape(10, 100, 100, 14)
    assert whole.load(PACE, reuses=False, renewed_every=7) == whole.load(PACE, reuses=False)


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
