"""Costs by degree: in profiles, and followed apart from one another."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from giornata.planning.cost_model import EVERY, CostModel, DegreeFit, Profile, StepParallelism
from giornata.planning.operations import COMPUTE
from giornata.planning.step_costs import StepCosts
from giornata.wire.workers import DegreeCosts
from tests.fakes.profiles import PROFILE, WEIGHTS, record
from tests.unit.planning.test_costing import works

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
