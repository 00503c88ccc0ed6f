"""Fits kinds of jobs, with scikit-learn. Pure, and slow: 0.2 s for 600 jobs. Never on an event loop."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Final

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture

from giornata_lab.simulation.rock_kinds import FeatureHistograms, Features, JobKindModel, Row, shares_of

MOST: Final = 8
"""Components."""
ADDED: Final = 1e-2
"""To covariances: features are discrete, and a component of equal ones would have none."""
BINS: Final = 8
ITERATIONS: Final = 50
SPREAD: Final = 1e-9
"""Least standard deviation by which a feature is divided."""


def fit_kinds(jobs: Sequence[Features], most: int = MOST) -> JobKindModel:
    """The mixture of 1 to `most` components with the least Bayesian information criterion.

    Args:
        jobs: at least two.
        most: components; fewer where there are fewer distinct jobs.

    Raises:
        ValueError: there are fewer than two jobs.
    """
    if len(jobs) < 2:
        raise ValueError(f"received {len(jobs)} jobs; accepted are 2 and more")
    told = np.array(jobs, dtype=np.float64)
    centre, scale = told.mean(0), told.std(0) + SPREAD
    z = (told - centre) / scale
    distinct = len(np.unique(z, axis=0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a fit that is not the best there is serves too
        made = [
            GaussianMixture(count, reg_covar=ADDED, random_state=0, max_iter=ITERATIONS).fit(z)
            for count in range(1, min(most, distinct) + 1)
        ]
    best = min(made, key=lambda mixture: mixture.bic(z))
    edges = tuple(_edges(z[:, place]) for place in range(z.shape[1]))
    return JobKindModel(
        _row(centre),
        _row(scale),
        _row(best.weights_),
        tuple(_row(mean) for mean in best.means_),
        tuple(tuple(_row(line) for line in factor) for factor in best.precisions_cholesky_),
        FeatureHistograms(
            edges, tuple(shares_of(z[:, place].tolist(), edges[place]) for place in range(z.shape[1]))
        ),
    )


def _edges(values: np.ndarray) -> Row:
    """Octiles, each once."""
    return _row(np.unique(np.quantile(values, np.linspace(0, 1, BINS + 1)[1:-1])))


def _row(values: np.ndarray) -> Row:
    return tuple(float(value) for value in values)
