"""Step times of a pool's rows: by degree, on changed devices, in halves and together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from giornata.planning.cost_model import StepCosts, StepParallelism
from giornata.planning.operations import NetworkOperations
from giornata.scheduling.degrees.pool import PoolRow
from giornata.scheduling.demand import RowShape, StepTimeModel
from giornata.scheduling.pool_rows import DegreeTimes, StepSize
from giornata.wire.models import BlockSpec
from giornata_lab.bench.systems.networks import PLAIN

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
