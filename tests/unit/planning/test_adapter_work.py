"""What adapters add to a step's work and to its costs, beside sums made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.planning.cost_model import CostModel, Profile, encode_compute_fit
from giornata.planning.operations import (
    COMPUTE,
    NETWORK,
    NetworkOperations,
    SequenceShape,
    StepWork,
    low_rank_weights,
    step_work,
)
from giornata.planning.step_costs import StepCosts, complete_weights
from giornata.wire.models import BlockSpec
from giornata.wire.values import BlockMode
from giornata.wire.workers import CostFit
from tests.fakes.profiles import PROFILE

WIDTH, RANK = 8, 2
SPECS = (BlockSpec(linear=3.0 * WIDTH**2, text=3.0 * WIDTH**2, outside=2.0 * WIDTH**2, pair=2.0, count=3),)
"""Three square modules a block; keys and values of outside cells pass two of them."""
FACTORS = 3 * 3 * RANK * 2 * WIDTH
"""Weights of factors on all nine modules."""


def multiplied(tokens: int, modules: int) -> int:
    """Multiplications of the factors of so many modules, token by token."""
    return sum(RANK * WIDTH + WIDTH * RANK for _ in range(tokens) for _ in range(modules))


@given(
    modes=st.lists(st.sampled_from(list(BlockMode)), min_size=3, max_size=3),
    computed=st.integers(1, 20),
    text=st.integers(0, 5),
)
def test_factors_multiply_the_tokens_that_pass_their_modules(
    modes: Sequence[BlockMode], computed: int, text: int
) -> None:
    shape = SequenceShape(text, 20, computed, low_rank=FACTORS, segments=0.5)
    expected = 0
    for mode in modes:
        own = 20 if mode is BlockMode.FULL else computed
        expected += multiplied(own + text, 3)
        expected += multiplied(20 - computed, 2) if mode is BlockMode.HIDDEN else 0
    work = step_work(NetworkOperations(SPECS), [shape, shape], [modes, modes])
    assert work.low_rank == pytest.approx(2 * expected)
    assert work.segments == 1
    plain = step_work(NetworkOperations(SPECS), [SequenceShape(text, 20, computed)] * 2, [modes, modes])
    assert work.features[: len(NETWORK)] == pytest.approx(plain.features[: len(NETWORK)])
    assert (plain.low_rank, plain.segments, plain.control) == (0, 0, 0)


def test_cells_of_a_coarse_block_meet_its_weights_as_often_as_there_are_coarse_cells() -> None:
    fine = BlockSpec(linear=100.0)
    coarse = BlockSpec(linear=100.0 / 4, grain=2)
    work = step_work(
        NetworkOperations([fine, coarse]), [SequenceShape(0, 16, 16, low_rank=20.0)], [[BlockMode.FULL] * 2]
    )
    assert work.low_rank == pytest.approx(10 * 16 + 10 * 4)


def test_control_work_is_added_once_however_many_blocks_there_are() -> None:
    shape = SequenceShape(2, 20, 5, control=50.0 * 22)
    assert step_work(NetworkOperations(SPECS), [shape], [[BlockMode.KV] * 3]).control == pytest.approx(
        50 * 22
    )


def test_weights_that_were_not_counted_are_told_by_the_size_of_a_file_of_16_bits() -> None:
    assert low_rank_weights(96, 1000) == 96
    assert low_rank_weights(0, 1000) == 500


def test_weights_without_adapters_are_completed_and_others_kept() -> None:
    assert complete_weights((1.0, 2.0, 3.0, 4.0, 5.0, 6.0)) == (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 3.0, 0.0, 3.0)
    whole = tuple(map(float, range(len(COMPUTE))))
    assert complete_weights(whole) == whole
    with pytest.raises(ValueError, match="received 7"):
        StepCosts((1.0,) * 7)


def test_a_worker_of_before_is_heard_and_one_of_now_tells_what_that_could_read() -> None:
    before = CostFit(weights=PROFILE.compute.weights, r2=1, residual_ms=0, samples=0, outliers=0)
    load = CostFit(weights=(0.0, 0.0), r2=1, residual_ms=0, samples=0, outliers=0)
    model = CostModel(before, load)
    assert model.costs == StepCosts(PROFILE.compute.weights)
    assert model.state.compute == encode_compute_fit(before)
    assert model.state.compute.weights == before.weights, "an older router takes as many"


def test_steps_without_adapters_leave_their_weights_as_they_were() -> None:
    model = CostModel.of(PROFILE)
    begun = model.costs.compute[len(NETWORK) :]
    true, rng = StepCosts((4.0, 0.2, 0.03, 2e-6, 0.0, 0.0)), np.random.default_rng(0)
    for tokens in rng.uniform(50, 5000, 100).tolist():
        work = StepWork(1, 2, tokens, tokens**2)
        model.observe_step(work, true.step_ms(work))
    assert model.costs.compute[len(NETWORK) :] == pytest.approx(begun)


def test_steps_with_adapters_teach_their_weights() -> None:
    model = CostModel.of(PROFILE)
    true = StepCosts((4.0, 0.2, 0.03, 2e-6, 0.0, 0.0, 0.09, 0.7, 0.01))
    rng = np.random.default_rng(0)
    for _ in range(400):
        tokens, rank, control = rng.uniform(50, 5000), rng.uniform(0, 0.2), rng.integers(0, 2)
        segments = float(rng.integers(0, 9))
        work = StepWork(1, 8, tokens, tokens**2, 0, 0, rank * tokens, segments, control * tokens)
        model.observe_step(work, true.step_ms(work))
    work = StepWork(1, 8, 2000, 2000**2, 0, 0, 300, 8, 2000)
    assert model.costs.step_ms(work) == pytest.approx(true.step_ms(work), rel=0.05)


def test_a_profile_of_before_adapters_is_completed_and_says_so() -> None:
    old = PROFILE.model_dump(mode="json")
    old |= {"schema_version": 2}
    del old["compute"]["derived"]
    old["compute"]["names"] = NETWORK
    read = Profile.model_validate(old)
    assert read.compute.derived == ("low_rank", "segments", "control")
    assert read.costs.compute == StepCosts(PROFILE.compute.weights).compute
    assert read.schema_version == 3
