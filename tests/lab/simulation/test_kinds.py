"""ROCK's kinds of jobs: features, the mixture and its densities, when it is fitted again; and its matching."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.scheduling.adapters import NeededLora
from giornata.scheduling.demand import JobDemand, RowShape
from giornata.scheduling.queue import SchedulingParams
from giornata.wire.jobs import Priority
from giornata.wire.workers import Tier
from giornata_lab.simulation.rock_kinds import (
    LEAST,
    PAUSE_S,
    FeatureHistograms,
    Features,
    FreeWorker,
    JobKindModel,
    RecentJobs,
    affinity,
    choose_worker,
    features_of,
    fit_kinds,
    match_weights,
    shares_of,
)

IDENTITY = tuple(tuple(float(row == column) for column in range(4)) for row in range(4))
MODEL = JobKindModel(
    centre=(20.0, 0.0, 2.0, 0.5),
    scale=(10.0, 2.0, 1.0, 1.0),
    weights=(0.75, 0.25),
    means=((0.0, 0.0, 0.0, 0.0), (3.0, 2.0, 0.0, 0.0)),
    factors=(IDENTITY, IDENTITY),
    binned=FeatureHistograms(((0.0,), (), (), ()), ((0.5, 0.5), (1.0,), (1.0,), (1.0,))),
)
"""Jobs of 20 steps without adapters, and of 50 steps with large ones."""


def job(
    steps: int, megabytes: int, priority: Priority, finish_by_s: float | None
) -> tuple[JobDemand, SchedulingParams]:
    adapters = (NeededLora("a", megabytes * 1_000_000),) if megabytes else ()
    made = JobDemand("m", "d", (RowShape(0, 16, 16, steps),), adapters=adapters)
    return made, SchedulingParams(priority, finish_by_s=finish_by_s)


def test_features_are_those_of_the_paper() -> None:
    """Steps, log bytes, kind, and 1 - exp(-t / 120 s) of the tolerated delay."""
    found = features_of(*job(30, 99, Priority.INTERACTIVE, 130.0), now=10.0)
    assert found == pytest.approx((30.0, math.log(100), 1.0, 1 - math.exp(-1)))
    assert features_of(*job(30, 0, Priority.INTERACTIVE, None), now=0.0) == pytest.approx(
        (30.0, 0.0, 2.0, 1 - math.exp(-1))
    )
    assert features_of(*job(30, 0, Priority.BATCH, None), now=0.0)[2:] == pytest.approx(
        (3.0, 1 - math.exp(-5))
    )
    assert features_of(*job(30, 0, Priority.INTERACTIVE, 5.0), now=9.0)[3] == 0.0


def test_the_density_is_that_of_a_normal_distribution() -> None:
    """At (30, 2, 2, 0.5), standardised (1, 1, 0, 0): squared distances 2 and 5 from the components."""
    near, far = MODEL.log_densities((30.0, 2.0, 2.0, 0.5))
    assert near == pytest.approx(math.log(0.75) - 1.0)
    assert far == pytest.approx(math.log(0.25) - 2.5)
    assert MODEL.kind((30.0, 2.0, 2.0, 0.5)) == 0
    assert MODEL.kind((50.0, 4.0, 2.0, 0.5)) == 1


def test_divergence_by_hand() -> None:
    """Three of four jobs above the edge, one added to both bins: (2/6, 4/6) against halves."""
    latest = [(10.0, 0.0, 2.0, 0.5), *[(30.0, 0.0, 2.0, 0.5)] * 3]
    expected = 2 / 6 * math.log(2 / 6 / 0.5) + 4 / 6 * math.log(4 / 6 / 0.5)
    assert MODEL.divergence(latest) == pytest.approx(expected)
    assert shares_of([1.0, 2.0, 2.0, 3.0], [2.0]) == pytest.approx((2 / 6, 4 / 6))


def drawn(seed: int, count: int) -> list[Features]:
    chance = Random(seed)  # noqa: S311 - a workload
    return [
        (float(chance.randint(20, 50)), chance.uniform(1, 6), float(kind), 1 - math.exp(-delay / 120))
        for kind, delay in (chance.choice([(1, 30), (2, 120), (3, 600)]) for _ in range(count))
    ]


def test_a_kind_by_stored_parameters_is_scikit_learns() -> None:
    """Beside `predict` of a mixture that is fitted to the same jobs."""
    from sklearn.mixture import GaussianMixture  # noqa: PLC0415 - takes a second, of each worker

    jobs = drawn(1, 600)
    model = fit_kinds(jobs)
    assert 2 <= model.components <= 8
    z = np.array([model.standardised(features) for features in jobs])
    oracle = GaussianMixture(model.components, reg_covar=1e-2, random_state=0, max_iter=50).fit(z)
    assert [model.kind(features) for features in jobs] == oracle.predict(z).tolist()
    logs = oracle._estimate_weighted_log_prob(z)
    ours = np.array([model.log_densities(features) for features in jobs])
    assert np.ptp(logs - ours) == pytest.approx(0.0, abs=1e-8), "up to a constant"


def test_the_number_of_kinds_has_the_least_bic() -> None:
    """Three clear clusters are three kinds."""
    chance = Random(5)  # noqa: S311 - a workload
    centres = [(20.0, 1.0, 1.0, 0.2), (35.0, 3.0, 2.0, 0.6), (50.0, 5.0, 3.0, 0.9)]
    jobs = [tuple(value + chance.gauss(0, 0.05) for value in chance.choice(centres)) for _ in range(300)]
    assert fit_kinds(jobs).components == 3  # type: ignore[arg-type]  # four each


@pytest.mark.parametrize("constant", [(), (0,), (0, 1, 2, 3)])
def test_constant_features_can_be_fitted(constant: tuple[int, ...]) -> None:
    jobs = [
        tuple(1.0 if place in constant else value for place, value in enumerate(features))
        for features in drawn(2, 120)
    ]
    model = fit_kinds(jobs)  # type: ignore[arg-type]  # four each
    assert 0 <= model.kind(jobs[0]) < model.components
    assert model.divergence(jobs) == pytest.approx(0.0, abs=0.2)


def test_one_job_cannot_be_fitted() -> None:
    with pytest.raises(ValueError, match="received 1 jobs; accepted are 2 and more"):
        fit_kinds([(1.0, 1.0, 1.0, 1.0)])


def test_a_model_is_fitted_when_there_are_jobs_and_again_when_they_have_changed() -> None:
    seen, first = RecentJobs(), drawn(3, 600)
    assert seen.to_fit(0.0) is None
    for features in first[:LEAST]:
        seen.see(features)
    assert seen.to_fit(10.0) == tuple(first[:LEAST])
    assert seen.to_fit(10.0 + PAUSE_S - 1) is None, "looked at a moment ago"
    for features in first[LEAST:]:
        seen.see(features)
    seen.model = fit_kinds(first)
    assert seen.to_fit(200.0) is None, "they have not changed"
    for features in drawn(4, 200):
        seen.see((features[0] + 60, *features[1:]))
    assert seen.to_fit(200.0 + PAUSE_S - 1) is None
    assert seen.to_fit(200.0 + PAUSE_S) is not None


@given(st.lists(st.floats(-5, 5), max_size=50), st.lists(st.floats(-5, 5), max_size=7, unique=True))
def test_shares_sum_to_one_and_none_is_empty(values: list[float], edges: list[float]) -> None:
    found = shares_of(values, sorted(edges))
    assert sum(found) == pytest.approx(1.0)
    assert min(found) > 0


# Matching: weights by hand, and the choice among the best.


def test_the_weight_by_hand() -> None:
    """0.6 · 0.5 + 0.3 · (1 - |0.4 - 0.7|) + 0.1 · 2 s / 4 s."""
    found = match_weights([FreeWorker("w", 0.5, 0.4, 4000.0), FreeWorker("best", 1.0, 0.7, 2000.0)])
    assert found == {"w": pytest.approx(0.3 + 0.21 + 0.05), "best": pytest.approx(1.0)}
    assert match_weights([FreeWorker("w", 0.0, 0.0, 0.0)]) == {"w": pytest.approx(0.09 + 0.1)}, (
        "nothing is to be computed"
    )


def test_affinity_counts_what_is_on_the_device() -> None:
    held = {"a": Tier.DEVICE, "b": Tier.MEMORY, "c": Tier.DISK}
    assert affinity({"a", "b", "d", "c"}, held) == 0.25
    assert affinity(set(), held) == 0.0


def test_of_the_three_best_the_least_utilised_is_chosen() -> None:
    workers = [
        FreeWorker("a", 1.0, 0.7, 1000.0),
        FreeWorker("b", 0.9, 0.6, 1000.0),
        FreeWorker("c", 0.8, 0.5, 1000.0),
        FreeWorker("d", 0.0, 0.0, 1000.0),
    ]
    assert sorted(match_weights(workers), key=match_weights(workers).__getitem__) == ["d", "c", "b", "a"]
    assert choose_worker(workers).name == "c"


@given(
    st.lists(
        st.builds(
            FreeWorker, st.text("abc", min_size=1), st.floats(0, 1), st.floats(0, 1), st.floats(1, 1e6)
        ),
        min_size=1,
        max_size=8,
        unique_by=lambda worker: worker.name,
    )
)
def test_weights_lie_between_nothing_and_one_and_the_chosen_one_is_among_the_best(
    workers: list[FreeWorker],
) -> None:
    weighed = match_weights(workers)
    assert all(0 <= value <= 1 + 1e-9 for value in weighed.values())
    best = choose_worker(workers)
    assert sum(value > weighed[best.name] for value in weighed.values()) < 3
    assert choose_worker(list(reversed(workers))) == best
