"""What rows are expected to cost, by degree and together, and when jobs that wait will be computed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from giornata.planning.cost_model import StepParallelism
from giornata.planning.operations import NetworkOperations, StepCosts
from giornata.scheduling.degrees.pool import PoolRow
from giornata.scheduling.demand import (
    LEAST,
    FinishEstimator,
    JobDemand,
    JobFinishEstimate,
    RowLoad,
    RowShape,
    StepTimeModel,
    WorkerEstimate,
    WorkerLoad,
    estimate_computed,
)
from giornata.scheduling.pool_rows import DegreeTimes, StepSize
from giornata.wire.models import BlockSpec
from giornata.wire.values import BlockMode
from giornata_lab.bench.systems.networks import PLAIN, PLAIN_4
from tests.present import present

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
    found = present(estimate_computed(workers, ahead, rows))
    return found.finish_ms


@given(workers=prospects, ahead=st.floats(0, 100), rows=st.integers(1, 10))
def test_all_that_comes_before_and_the_job_itself_fit_below_the_level(
    workers: list[WorkerEstimate], ahead: float, rows: int
) -> None:
    found = present(estimate_computed(workers, ahead, rows))
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


# Finish times against a run step by step.


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


# Step times of a pool's rows: by degree, on changed devices, in halves and together.


SHAPE = RowShape(text=10, image=100, computed=20, steps=8)


def costs(call_ms: float, token_ms: float) -> StepCosts:
    return StepCosts((call_ms, 0.0, token_ms, 0.0, 0.0, 0.0))


POOL = StepTimeModel(
    costs(5.0, 1.0),
    PLAIN,
    ways=((StepParallelism(2), costs(8.0, 0.6)), (StepParallelism(2, halves=True), costs(3.0, 0.65))),
)
TIMES = DegreeTimes(POOL)


def row(size: StepSize, key: int = 0) -> PoolRow:
    times = TIMES.of(size)
    return PoolRow(key, 0.0, 10.0, 5, times.step_s, times.moved_s, size=size)


def test_a_degree_without_costs_is_not_there() -> None:
    assert set(TIMES.of(StepSize.of(SHAPE)).step_s) == {1, 2}
    assert set(DegreeTimes(replace(POOL, ways=())).of(StepSize.of(SHAPE)).step_s) == {1}


def test_a_whole_picture_takes_as_long_on_other_devices() -> None:
    times = TIMES.of(StepSize.of(replace(SHAPE, computed=100), reuses=True))
    assert times.step_s == times.moved_s == {1: pytest.approx(0.115), 2: pytest.approx(0.074)}


@pytest.mark.parametrize(("reuses", "every"), [(True, 0), (False, 4)])
def test_a_row_that_takes_what_a_step_in_full_made_pays_for_other_devices(reuses: bool, every: int) -> None:
    times = TIMES.of(StepSize.of(SHAPE, reuses=reuses, renewed_every=every))
    assert times.moved_s[1] == pytest.approx(0.115)
    step_ms = 35.0 if reuses else 35.0 + (115.0 - 35.0) / every
    assert times.step_s[1] == pytest.approx(step_ms / 1e3)


def test_a_row_whose_correction_is_known_from_the_start_does_not_pay() -> None:
    size = StepSize.of(SHAPE, reuses=True, corrected=True)
    assert not size.pays
    assert TIMES.of(size).moved_s == TIMES.of(size).step_s


def test_a_prefix_is_computed_again_on_other_devices() -> None:
    times = TIMES.of(StepSize.of(replace(SHAPE, prefix=30), reuses=True, corrected=True))
    assert times.moved_s[1] - times.step_s[1] == pytest.approx(0.030)


def test_halves_are_for_guided_rows_and_the_quicker_way_counts() -> None:
    alone, guided = StepSize.of(SHAPE), StepSize.of(replace(SHAPE, sequences=2))
    assert TIMES.of(alone).step_s[2] == pytest.approx(0.074)
    assert TIMES.of(guided).step_s[2] == pytest.approx((8 + 0.6 * 220) / 1e3)
    assert not TIMES.halves([alone])
    assert not TIMES.halves([guided]), "8 + 0.6 * 220 is less than 3 + 0.65 * 220"


def test_which_way_is_quicker_depends_on_what_is_computed() -> None:
    small = StepSize.of(replace(SHAPE, sequences=2), reuses=True)
    assert TIMES.halves([small])
    assert not TIMES.halves([small], [True])
    assert not TIMES.halves([small, StepSize.of(SHAPE)])
    assert TIMES.of(small).step_s[2] == pytest.approx((3 + 0.65 * 60) / 1e3)


def test_rows_together_pay_for_one_call() -> None:
    size = StepSize.of(SHAPE, reuses=True)
    assert TIMES.together([row(size), row(size, 1)], 1) == pytest.approx((5 + 2 * 30) / 1e3)
    assert TIMES.together([row(size), row(size, 1)], 2) == pytest.approx((8 + 2 * 18) / 1e3)
    assert TIMES.together([row(size), row(size, 1)], 4) is None


def test_more_rows_or_tokens_than_fit_do_not_share_a_step() -> None:
    size = StepSize.of(SHAPE, reuses=True)
    rows = [row(size, key) for key in range(3)]
    assert DegreeTimes(POOL, rows=2).together(rows, 1) is None
    assert DegreeTimes(POOL, tokens=89).together(rows, 1) is None
    assert DegreeTimes(POOL, rows=3, tokens=90).together(rows, 1) is not None


def test_rows_of_another_size_in_full_are_another_forward_where_blocks_are_taken_together() -> None:
    unet = NetworkOperations([BlockSpec(linear=1.0, text=1.0, together=True)])
    times = DegreeTimes(replace(POOL, operations=unet))
    full = StepSize.of(replace(SHAPE, computed=100))
    larger = StepSize.of(replace(SHAPE, image=200, computed=200))
    masked = StepSize.of(SHAPE, reuses=True)
    rows = [row(full), row(larger, 1), row(masked, 2)]
    assert times.together(rows, 1) == pytest.approx((3 * 5 + 110 + 210 + 30) / 1e3)
    assert times.together([row(full), row(full, 1)], 1) == pytest.approx((5 + 220) / 1e3)


def test_sizes_of_rows_that_differ_in_steps_left_are_equal() -> None:
    assert StepSize.of(SHAPE, reuses=True) == StepSize.of(replace(SHAPE, steps=3, begun=True), reuses=True)
