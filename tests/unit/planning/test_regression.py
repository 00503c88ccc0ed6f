"""Regressions of step times: exact on what is linear, never negative, following a machine that changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import lsq_linear

from giornata.planning.cost_model import OnlineRegression, fit

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


def test_online_fits_as_often_as_it_is_told() -> None:
    online, offline = OnlineRegression(OFFLINE), np.asarray(OFFLINE)
    for x, t in zip(*samples(1), strict=True):
        online.update(x.tolist(), float(t))
        assert (online.weights == offline).all()
    online.refit()
    assert (online.weights != offline).any()


OFFLINE = tuple((TRUE * [1, 2, 1]).tolist())


def taken(online: OnlineRegression, features: list[float], time_ms: float) -> bool:
    found = online.update(features, time_ms)
    online.refit()
    return found


def test_online_the_machines_own_times_win() -> None:
    online = OnlineRegression(OFFLINE)
    assert online.weights @ [1, 100, 0] == pytest.approx(7)
    for x, t in zip(*samples(1, count=400, noise=0.01), strict=True):
        taken(online, x.tolist(), float(t))
    features, times = samples(2, count=50)
    np.testing.assert_allclose(features @ online.weights, times, rtol=0.05)
    assert online.samples == 400


def test_online_what_no_sample_shows_stays_as_it_was() -> None:
    online = OnlineRegression(OFFLINE)
    for tokens in range(100, 500, 10):
        taken(online, [1, tokens, 0], 3 + 0.02 * tokens)
    assert online.weights[2] == pytest.approx(TRUE[2])
    assert online.weights @ [1, 300, 0] == pytest.approx(9, rel=0.05)


def test_an_outlier_changes_nothing_and_many_of_them_do() -> None:
    online = OnlineRegression(OFFLINE)
    rng = np.random.default_rng(0)
    for _ in range(60):
        tokens = float(rng.uniform(100, 500))
        taken(online, [1, tokens, 0], (3 + 0.02 * tokens) * float(rng.uniform(0.99, 1.01)))
    before = online.weights.copy()
    assert not taken(online, [1, 300, 0], 500.0)
    np.testing.assert_array_equal(online.weights, before)
    for _ in range(600):
        tokens = float(rng.uniform(100, 500))
        taken(online, [1, tokens, 0], 10 * (3 + 0.02 * tokens))
    assert online.weights @ [1, 300, 0] == pytest.approx(90, rel=0.1)
    assert online.outliers >= 8
