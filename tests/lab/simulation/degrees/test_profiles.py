"""The derived profiles that ship: what their maker makes, and how far they are from the formula."""

from __future__ import annotations

import pytest

from giornata.planning.cost_model import ALONE, LinearFit, StepParallelism
from giornata.planning.operations import NETWORK, StepWork
from giornata.planning.step_costs import StepCosts
from giornata.scheduling.degrees.pool import DEGREES
from giornata_lab.simulation.degrees.step_times import DerivedStep, made, steps
from giornata_lab.simulation.h100 import MACHINES, shipped
from giornata_lab.simulation.machines import PUBLISHED

WHOLE, MASKED = 0.04, 0.105
"""Largest errors, as shares of the formula's times, of steps that compute whole pictures, and of others."""


@pytest.mark.parametrize("name", MACHINES)
def test_the_file_is_what_its_maker_makes(name: str) -> None:
    file, again = shipped(name), made(name)
    assert again.model_copy(update={"compute": file.compute, "degrees": file.degrees}) == file
    assert [fit.way for fit in again.degrees] == [fit.way for fit in file.degrees]
    pairs = [(file.compute, again.compute)]
    pairs += [(old.compute, new.compute) for old, new in zip(file.degrees, again.degrees, strict=True)]
    for old, new in pairs:
        assert _close(new) == pytest.approx(_close(old), rel=1e-4)


@pytest.mark.parametrize("name", MACHINES)
def test_it_is_near_the_formula_at_every_degree(name: str) -> None:
    profile = shipped(name)
    costs = {ALONE: profile.costs, **dict(profile.ways)}
    assert [way.degree for way in costs] == list(DEGREES)
    for degree in DEGREES:
        for step in steps():
            expected_ms = 1e3 * step.seconds(degree, eager=MACHINES[name])
            limit = WHOLE if step.computed == step.image else MASKED
            assert _step_ms(costs[StepParallelism(degree)], step) == pytest.approx(expected_ms, rel=limit)


def test_eager_steps_are_longer_and_wide_ones_more_so() -> None:
    step = DerivedStep(4096, 4096)
    one, eight = (step.seconds(degree, eager=True) / step.seconds(degree, eager=False) for degree in (1, 8))
    assert one == pytest.approx(1.1)
    assert eight > 1.2


def test_it_says_that_it_is_derived() -> None:
    assert "formula" in shipped("h100").derived
    assert shipped("h100").device != shipped("h100-eager").device


def _step_ms(costs: StepCosts, step: DerivedStep) -> float:
    return costs.step_ms(StepWork(*step.features))


def _close(fit: LinearFit) -> list[float]:
    """Weights of what the network computes, and how good they are."""
    kept = [weight for name, weight in zip(fit.names, fit.weights, strict=True) if name in NETWORK]
    return [*kept, fit.r2, fit.error_p95]


def test_a_simulated_cluster_may_have_such_machines() -> None:
    machine = PUBLISHED["h100-eager"]()
    assert machine.costs == shipped("h100-eager").costs
    assert machine.device == "NVIDIA H100, not compiled"
