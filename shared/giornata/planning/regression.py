"""Step times as linear functions of what is computed and moved: fitted offline, refined online. Pure.

FlashPS (EuroSys '26, section 4.4) estimates computing by the number of masked tokens and loading by bytes, with
R² = 0.99. Coefficients are costs, so that none may be negative (Lawson and Hanson's non-negative least squares).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from scipy.optimize import nnls

Array = NDArray[np.float64]

FORGETTING: Final = 0.99
"""Weight of the past at each sample."""
TRUST: Final = 0.1
"""In the offline weights, in samples."""
SURPRISE: Final = 6.0
"""A sample this many times farther from the prediction than usual is an outlier."""
USUAL_DECAY: Final = 0.95
STUBBORN: Final = 8
"""So many outliers in a row are no outliers: what they measure has changed."""


class Fit(BaseModel):
    """A linear model and how good it is on what it was fitted to, as a profile holds it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    names: tuple[str, ...]
    weights: tuple[float, ...]
    """ms per unit, none negative."""
    r2: float
    """Coefficient of determination; 1 where the times are constant and met."""
    residual_ms_p50: float
    residual_ms_p95: float
    """Quantiles of absolute residuals."""
    samples: int
    error_p50: float = 0.0
    error_p95: float = 0.0
    """Quantiles of absolute residuals, each as a share of its time."""

    def predict(self, features: Sequence[float]) -> float:
        """Milliseconds."""
        return float(np.dot(self.weights, features))


def fit(names: Sequence[str], features: Array, times: Array, *, relative: bool = False) -> Fit:
    """Least squares without negative weights.

    Args:
        names: of the features.
        features: (samples, features); a constant 1 is one of them where there is an offset.
        times: (samples,) ms, above 0 where residuals are relative.
        relative: minimise residuals as shares of the times: a short one then counts as much as a long one.

    Raises:
        ValueError: shapes do not fit together, or there are fewer samples than features.
    """
    if features.shape != (len(times), len(names)) or len(times) < len(names):
        raise ValueError(
            f"received features {features.shape} and {len(times)} times for {len(names)} names; "
            "one row a time and at least as many rows as names are needed"
        )
    emphasis = 1 / times if relative else np.ones(len(times))
    weighed = features * emphasis[:, None]
    scale = np.abs(weighed).max(0)
    scale[scale == 0] = 1.0
    weights = nnls(weighed / scale, times * emphasis)[0] / scale
    return graded(names, weights, features, times)


def graded(names: Sequence[str], weights: Array, features: Array, times: Array) -> Fit:
    """Grade `weights`, (features,) ms per unit, on `features`, (samples, features), and `times`, (samples,) ms."""
    residuals = times - features @ weights
    shares = np.abs(residuals) / np.maximum(np.abs(times), np.finfo(np.float64).tiny)
    p50, p95 = np.quantile(np.abs(residuals), (0.5, 0.95)).tolist()
    error_p50, error_p95 = np.quantile(shares, (0.5, 0.95)).tolist()
    return Fit(
        names=tuple(names),
        weights=tuple(weights.tolist()),
        r2=determination(times, residuals),
        residual_ms_p50=p50,
        residual_ms_p95=p95,
        samples=len(times),
        error_p50=error_p50,
        error_p95=error_p95,
    )


def determination(times: Array, residuals: Array) -> float:
    """R², the share of the times' spread that is predicted; 1 where the times are constant and met."""
    spread, missed = float(((times - times.mean()) ** 2).sum()), float((residuals**2).sum())
    return 1 - missed / spread if spread > 0 else float(missed < 1e-9)


class Online:
    """A fit that follows its machine: least squares with forgetting, drawn to the offline weights where nothing is new.

    Minimises the sum over samples of FORGETTING^age * (time - w x)², plus TRUST samples' worth of (w - offline)² per
    weight, without negative weights. Single outliers (a page fault, another process) are left out.
    """

    def __init__(self, offline: Sequence[float]) -> None:
        self._offline = np.asarray(offline)
        count = len(offline)
        self.weights: Array = self._offline.copy()
        """(features,) ms per unit."""
        self.samples = 0
        self.outliers = 0
        self._mass = 0.0
        self._products = np.zeros((count, count))
        self._answers = np.zeros(count)
        self._usual_ms = 0.0
        self._in_a_row = 0

    def update(self, features: Sequence[float], time_ms: float) -> bool:
        """Take in a sample for the next :meth:`refit`; False where it was an outlier and only counts."""
        x = np.asarray(features, np.float64)
        residual = abs(time_ms - float(self.weights @ x))
        if self._is_outlier(residual):
            self.outliers += 1
            self._in_a_row += 1
            return False
        self._in_a_row = 0
        self.samples += 1
        self._usual_ms = USUAL_DECAY * self._usual_ms + (1 - USUAL_DECAY) * residual
        self._mass = FORGETTING * self._mass + 1
        self._products = FORGETTING * self._products + np.outer(x, x)
        self._answers = FORGETTING * self._answers + x * time_ms
        return True

    def refit(self) -> None:
        """Fit the weights, at least one sample: least squares from the normal equations, by their Cholesky factor."""
        size = np.sqrt(np.diag(self._products) / self._mass)
        size[size == 0] = 1.0
        scaled = self._products / np.outer(size, size) + TRUST * np.eye(len(size))
        answers = self._answers / size + TRUST * self._offline * size
        factor = np.linalg.cholesky(scaled)
        self.weights = nnls(factor.T, np.linalg.solve(factor, answers))[0] / size

    def _is_outlier(self, distance_ms: float) -> bool:
        known = self.samples > len(self.weights) and self._usual_ms > 0
        return known and distance_ms > SURPRISE * self._usual_ms and self._in_a_row < STUBBORN
