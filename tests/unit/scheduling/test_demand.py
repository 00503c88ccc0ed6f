"""What rows are expected to cost, against the sum over their steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.planning.cost_model import StepCosts
from giornata.scheduling.demand import JobDemand, RowShape, StepTimeModel
from giornata.wire.values import BlockMode
from giornata_lab.bench.systems.networks import PLAIN_4

COSTS = StepCosts((5.0, 0.1, 0.2, 0.001, 0.0, 0.0))
PACE = StepTimeModel(COSTS, PLAIN_4, renewed_every=7)


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
