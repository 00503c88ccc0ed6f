"""The cost model in service: it follows its machine, ignores what is no step's own time, and tells how good it is."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from giornata.planning.cost_model import EVERY, FEWEST, CostModel
from giornata.planning.operations import StepWork
from giornata.planning.step_costs import StepCosts
from tests.fakes.profiles import LOAD_WEIGHTS, PROFILE, WEIGHTS

TRUE = StepCosts((4.0, 0.2, 0.03, 2e-6, 0.0, 0.0), (0.1, 3e-6))
"""Another machine than the profile's."""


def works(count: int, seed: int = 0) -> list[StepWork]:
    rng = np.random.default_rng(seed)
    rows, computed, share = rng.integers(1, 9, count), rng.uniform(50, 1500, count), rng.uniform(0, 1, count)
    return [
        StepWork(4.0 * n, 4 * n * tokens, 4 * n * tokens * part, 4 * n * tokens * tokens * (1 + part))
        for n, tokens, part in zip(rows.tolist(), computed.tolist(), share.tolist(), strict=True)
    ]


def serve(model: CostModel, count: int = 300, seed: int = 0, factor: float = 1.0) -> None:
    noise = np.random.default_rng(seed + 1).uniform(0.98, 1.02, count)
    for work, one in zip(works(count, seed), noise.tolist(), strict=True):
        model.observe_step(work, TRUE.step_ms(work) * one * factor)


def test_it_begins_as_the_profile_says() -> None:
    model = CostModel.of(PROFILE)
    assert model.costs == StepCosts(WEIGHTS, LOAD_WEIGHTS)
    assert model.state.compute.r2 == PROFILE.compute.r2
    assert (model.state.load.residual_ms, model.state.load.samples) == (0.5, 0)


def test_it_comes_to_predict_the_machine_that_it_serves_on() -> None:
    model = CostModel.of(PROFILE)
    serve(model)
    for work in works(50, seed=7):
        assert model.costs.step_ms(work) == pytest.approx(TRUE.step_ms(work), rel=0.05)
    assert min(model.costs.compute) >= 0
    told = model.state.compute
    assert (*told.weights, *told.adapting) == model.costs.compute
    assert model.state.compute.r2 > 0.99
    assert model.state.compute.samples == 300 - 300 % EVERY


def test_a_stall_is_counted_and_changes_nothing() -> None:
    model = CostModel.of(PROFILE)
    serve(model)
    before = model.costs
    (work,) = works(1, seed=3)
    assert not model.observe_step(work, 20 * TRUE.step_ms(work))
    serve(model, EVERY, seed=5)
    assert model.state.compute.outliers == 1
    for a, b in zip(before.compute, model.costs.compute, strict=True):
        assert b == pytest.approx(a, rel=0.1, abs=1e-3)


def test_a_machine_that_has_become_slower_is_believed() -> None:
    model = CostModel.of(PROFILE)
    serve(model)
    serve(model, 600, seed=9, factor=5.0)
    for work in works(20, seed=11):
        assert model.costs.step_ms(work) == pytest.approx(5 * TRUE.step_ms(work), rel=0.15)


def test_loads_are_taken_in_with_the_next_step() -> None:
    model = CostModel.of(PROFILE)
    sizes = np.random.default_rng(0).integers(10_000, 1_000_000, 200).tolist()

    def loader() -> None:
        for size in sizes:
            model.observe_load(size, TRUE.load_ms(size))

    thread = threading.Thread(target=loader)
    thread.start()
    thread.join()
    assert model.costs.load == LOAD_WEIGHTS
    serve(model, 1)
    assert model.costs.load_ms(500_000) == pytest.approx(TRUE.load_ms(500_000), rel=0.05)
    assert model.state.load.samples > 150


def test_until_there_are_enough_samples_the_profile_tells_how_good_it_is() -> None:
    model = CostModel.of(PROFILE)
    serve(model, FEWEST - EVERY)
    assert model.state.compute.r2 == PROFILE.compute.r2
    serve(model, EVERY, seed=2)
    assert model.state.compute.r2 != PROFILE.compute.r2


def test_a_step_of_no_work_and_no_weight_is_taken() -> None:
    free = PROFILE.model_copy(update={"compute": PROFILE.compute.model_copy(update={"weights": (0.0,) * 6})})
    model = CostModel.of(free)
    for _ in range(4 * EVERY):
        model.observe_step(StepWork(4, 400, 0, 40_000), 8.0)
    assert model.costs.step_ms(StepWork(4, 400, 0, 40_000)) == pytest.approx(8.0, rel=0.2)
