"""What steps cost: fitted, by degree, and learnt from the machine in service."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy.optimize import lsq_linear

from giornata.planning.cost_model import (
    EVERY,
    FEWEST,
    CostModel,
    DegreeFit,
    OnlineRegression,
    Profile,
    StepParallelism,
    encode_compute_fit,
    fit,
    robust_fit,
)
from giornata.planning.operations import (
    COMPUTE,
    NETWORK,
    StepCosts,
    StepWork,
    complete_weights,
)
from giornata.wire.workers import CostFit, DegreeCosts
from tests.fakes.profiles import LOAD_WEIGHTS, PROFILE, WEIGHTS, record

NAMES = ("offset", "tokens", "pairs")
TRUE = np.array([3.0, 0.02, 1e-6])


def samples(seed: int, count: int = 40, noise: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens = rng.uniform(100, 5000, count)
    features = np.stack([np.ones(count), tokens, tokens * rng.uniform(100, 5000, count)], 1)
    return features, features @ TRUE * (1 + noise * rng.standard_normal(count))


def test_a_linear_machine_is_met() -> None:
    found = fit(NAMES, *samples(0))
    np.testing.assert_allclose(found.weights, TRUE, rtol=1e-6)
    assert (found.names, found.samples) == (NAMES, 40)
    assert found.r2 == pytest.approx(1)
    assert found.residual_ms_p95 < 1e-6
    assert found.predict([1, 100, 0]) == pytest.approx(5)


@given(st.integers(0, 10**6))
def test_the_fit_is_the_best_without_negative_weights(seed: int) -> None:
    """Beside another solver, on times that want some weights below zero."""
    rng = np.random.default_rng(seed)
    features = rng.uniform(0, 1, (12, 3)) * [1, 1e3, 1e6]
    times = features @ (rng.standard_normal(3) / [1, 1e3, 1e6]) + rng.standard_normal(12) * 0.1
    found = fit(NAMES, features, times)
    assert min(found.weights) >= 0
    scale = features.max(0)
    best = lsq_linear(features / scale, times, (0, np.inf), method="bvls", tol=1e-14)
    missed = float(((times - features @ np.array(found.weights)) ** 2).sum())
    assert missed <= 2 * best.cost * (1 + 1e-6) + 1e-12


@pytest.mark.parametrize("shape", [(2, 3), (5, 2)])
def test_samples_that_do_not_suffice_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"{shape[0]} times for 3 names"):
        fit(NAMES, np.ones(shape), np.ones(shape[0]))


def test_a_constant_time_that_is_met_is_explained() -> None:
    assert fit(["offset"], np.ones((5, 1)), np.full(5, 7.0)).r2 == 1
    assert fit(["offset"], np.zeros((5, 1)), np.full(5, 7.0)).r2 == 0


def test_relative_residuals_count_short_and_long_times_alike() -> None:
    """A machine that is a tenth slower than linear where steps are long."""
    tokens = np.geomspace(10, 1e6, 40)
    features, times = np.stack([np.ones(40), tokens], 1), (2 + 0.01 * tokens) * np.geomspace(1, 1.1, 40)
    absolute = fit(["offset", "tokens"], features, times)
    relative = fit(["offset", "tokens"], features, times, relative=True)
    assert relative.error_p95 < 0.1 < absolute.error_p95
    assert absolute.r2 >= relative.r2 > 0.99


@pytest.mark.parametrize("robust", [True, False])
def test_a_sample_that_was_disturbed_moves_a_robust_fit_by_little(robust: bool) -> None:
    features, times = samples(0, noise=0.01)
    times[7] = 1018.0
    weights = (robust_fit(NAMES, features, times) if robust else fit(NAMES, features, times)).weights
    calm = np.ones(40, bool)
    calm[7] = False
    missed = np.abs(features[calm] @ np.array(weights) / times[calm] - 1)
    assert (missed.max() < 0.05) == robust


def begun(*weights: float) -> CostFit:
    return CostFit(weights=weights, r2=0.5, residual_ms=9.0, samples=0, outliers=0)


def test_online_it_fits_as_often_as_it_is_told() -> None:
    online = OnlineRegression(begun(*(TRUE * [1, 2, 1])))
    for tokens in range(100, 500, 10):
        online.take([1, tokens, 0], 3 + 0.02 * tokens)
        assert online.weights == tuple(TRUE * [1, 2, 1])
    online.refit()
    assert np.dot(online.weights, [1, 300, 0]) == pytest.approx(9, rel=0.05)


@pytest.mark.parametrize("slowness", [0.5, 1.0, 1.8])
def test_online_what_no_sample_shows_is_as_much_slower_as_the_others(slowness: float) -> None:
    online = OnlineRegression(begun(*TRUE))
    for tokens in range(100, 500, 10):
        online.take([1, tokens, 0], slowness * (3 + 0.02 * tokens))
    online.refit()
    assert online.weights == pytest.approx(tuple(slowness * TRUE), rel=0.01)


def test_a_cost_that_was_held_to_be_none_says_little_of_the_others() -> None:
    online = OnlineRegression(begun(3.0, 0.0, 1e-6))
    for _ in range(40):
        online.take([0, 1000, 0], 20.0)
    online.refit()
    assert online.weights == pytest.approx((8 * 3, 0.02, 8e-6), rel=0.01)


# Costs of service.


MACHINE = StepCosts((4.0, 0.2, 0.03, 2e-6, 0.0, 0.0), (0.1, 3e-6))
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
        model.observe_step(work, MACHINE.step_ms(work) * one * factor)


def test_it_begins_as_the_profile_says() -> None:
    model = CostModel.of(PROFILE)
    assert model.costs == StepCosts(WEIGHTS, LOAD_WEIGHTS)
    assert model.state.compute.r2 == PROFILE.compute.r2
    assert (model.state.load.residual_ms, model.state.load.samples) == (0.5, 0)


def test_it_comes_to_predict_the_machine_that_it_serves_on() -> None:
    model = CostModel.of(PROFILE)
    serve(model)
    for work in works(50, seed=7):
        assert model.costs.step_ms(work) == pytest.approx(MACHINE.step_ms(work), rel=0.05)
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
    assert not model.observe_step(work, 20 * MACHINE.step_ms(work))
    serve(model, EVERY, seed=5)
    assert model.state.compute.outliers == 1
    for a, b in zip(before.compute, model.costs.compute, strict=True):
        assert b == pytest.approx(a, rel=0.1, abs=1e-3)


def test_a_machine_that_has_become_slower_is_believed() -> None:
    model = CostModel.of(PROFILE)
    serve(model)
    serve(model, 600, seed=9, factor=5.0)
    for work in works(20, seed=11):
        assert model.costs.step_ms(work) == pytest.approx(5 * MACHINE.step_ms(work), rel=0.15)


def test_loads_are_taken_in_with_the_next_step() -> None:
    model = CostModel.of(PROFILE)
    sizes = np.random.default_rng(0).integers(10_000, 1_000_000, 200).tolist()

    def loader() -> None:
        for size in sizes:
            model.observe_load(size, MACHINE.load_ms(size))

    thread = threading.Thread(target=loader)
    thread.start()
    thread.join()
    assert model.costs.load == LOAD_WEIGHTS
    serve(model, 1)
    assert model.costs.load_ms(500_000) == pytest.approx(MACHINE.load_ms(500_000), rel=0.05)
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


# Weights of adapters.


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
    begun, rng = model.costs.compute[len(NETWORK) :], np.random.default_rng(0)
    for tokens in rng.uniform(50, 5000, 100).tolist():
        work = StepWork(1, 2, tokens, tokens**2)
        model.observe_step(work, PROFILE.costs.step_ms(work))
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


# Costs by degree.


TWO = tuple(0.6 * weight for weight in (*WEIGHTS, 0.0, 0.0, 0.0))
FOUR = tuple(0.4 * weight for weight in (*WEIGHTS, 0.0, 0.0, 0.0))
HALVES = tuple(0.55 * weight for weight in (*WEIGHTS, 0.0, 0.0, 0.0))
POOL = PROFILE.model_copy(
    update={
        "degrees": (
            DegreeFit(degree=4, compute=record(COMPUTE, FOUR)),
            DegreeFit(degree=2, compute=record(COMPUTE, TWO)),
            DegreeFit(degree=2, halves=True, compute=record(COMPUTE, HALVES)),
        )
    }
)


def test_a_profile_keeps_its_degrees_and_an_older_one_has_none() -> None:
    assert Profile.model_validate_json(POOL.model_dump_json()) == POOL
    older = json.loads(PROFILE.model_dump_json())
    for field in ("degrees", "derived"):
        del older[field]
    read = Profile.model_validate(older)
    assert read.ways == ()
    assert read == PROFILE


def test_costs_of_each_way_are_its_own_weights() -> None:
    assert [way for way, _ in POOL.ways] == [
        StepParallelism(2),
        StepParallelism(2, halves=True),
        StepParallelism(4),
    ]
    costs = dict(POOL.ways)
    assert costs[StepParallelism(4)] == StepCosts(FOUR, POOL.load.weights)
    assert costs[StepParallelism(2, halves=True)].compute == pytest.approx(HALVES)


@pytest.mark.parametrize(("degree", "halves"), [(1, False), (0, False), (4, True)])
def test_a_degree_that_is_none_is_refused(degree: int, halves: bool) -> None:
    with pytest.raises(ValidationError, match=rf"received degree {degree}.*accepted are"):
        DegreeFit(degree=degree, halves=halves, compute=record(COMPUTE, TWO))


def test_a_degree_that_is_there_twice_is_refused() -> None:
    twice = {**POOL.model_dump(), "degrees": [fit.model_dump() for fit in POOL.degrees[:2]] * 2}
    with pytest.raises(ValidationError, match="received degree 4, 2 more than once"):
        Profile.model_validate(twice)


def test_a_step_teaches_its_own_way_and_no_other() -> None:
    model = CostModel.of(POOL)
    before = dict(model.ways)
    for work in works(10 * EVERY):
        model.observe_step(work, 3 * StepCosts(TWO).step_ms(work), degree=2)
    after = dict(model.ways)
    assert model.costs == PROFILE.costs
    assert after[StepParallelism(4)] == before[StepParallelism(4)]
    assert after[StepParallelism(2, halves=True)] == before[StepParallelism(2, halves=True)]
    (work,) = works(1, seed=4)
    assert after[StepParallelism(2)].step_ms(work) == pytest.approx(
        3 * StepCosts(TWO).step_ms(work), rel=0.05
    )


def test_telemetry_tells_all_ways_and_how_many_samples_each_has() -> None:
    model = CostModel.of(POOL)
    for work in works(EVERY):
        model.observe_step(work, StepCosts(HALVES).step_ms(work), degree=2, halves=True)
    told = {StepParallelism(one.degree, one.halves): one.compute for one in model.state.degrees}
    assert list(told) == [StepParallelism(2), StepParallelism(2, halves=True), StepParallelism(4)]
    assert [fit.samples for fit in told.values()] == [0, EVERY, 0]
    assert model.state.compute.samples == 0


def test_a_step_of_a_way_without_costs_is_not_taken() -> None:
    model = CostModel.of(PROFILE)
    assert not any(model.observe_step(work, 1.0, degree=2) for work in works(2 * EVERY))
    assert model.ways == ()
    assert model.state.compute.samples == 0


def test_a_way_that_becomes_known_is_followed_and_a_known_one_stays() -> None:
    model = CostModel.of(POOL)
    before = dict(model.ways)
    told = POOL.model_copy(update={"degrees": (DegreeFit(degree=8, compute=record(COMPUTE, FOUR)),)})
    other = DegreeCosts(degree=2, compute=CostModel.of(told).state.compute)
    model.learn_of([*CostModel.of(told).state.degrees, other])
    assert dict(model.ways) == {**before, StepParallelism(8): StepCosts(FOUR, POOL.load.weights)}
