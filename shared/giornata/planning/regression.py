"""Step times as linear functions of what is computed and moved: fitted offline, refined online. Pure.

FlashPS (EuroSys '26, section 4.4) estimates computing by the number of masked tokens and loading by bytes, with R² = 0.99.
Coefficients are costs, so that none may be negative: where least squares wants one below zero, it is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

Features = NDArray[np.float64]
"""(samples, features) or (features,); a constant 1 is one of them where there is an offset."""
Times = NDArray[np.float64]
"""(samples,) in ms."""

FIRST_UNCERTAINTY: Final = 1e4
"""Relative variance of weights that nothing is known of."""
SURPRISE: Final = 6.0
"""A sample this many times farther from the prediction than usual is an outlier."""
USUAL_DECAY: Final = 0.95
STUBBORN: Final = 8
"""So many outliers in a row are no outliers: what they measure has changed."""


@dataclass(frozen=True)
class Fit:
    """A linear model and how good it is on what it was fitted to."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    """ms per unit, none negative."""
    r2: float
    """Coefficient of determination; 1 where the times are constant and met."""
    residual_ms_p50: float
    residual_ms_p95: float
    """Of absolute residuals."""
    samples: int

    def predict(self, features: Sequence[float]) -> float:
        """Milliseconds."""
        return float(np.dot(self.weights, features))


def fit(names: Sequence[str], features: Features, times: Times) -> Fit:
    """Least squares without negative weights.

    Args:
        names: of the columns.
        features: (samples, features).
        times: (samples,) ms.

    Raises:
        ValueError: shapes do not fit together, or there are fewer samples than features.
    """
    if features.shape != (len(times), len(names)) or len(times) < len(names):
        raise ValueError(
            f"received features {features.shape} and {len(times)} times for {len(names)} names; "
            "one row a time and at least as many rows as names are needed"
        )
    weights = _non_negative(features, times)
    residuals = times - features @ weights
    spread = float(((times - times.mean()) ** 2).sum())
    missed = float((residuals**2).sum())
    p50, p95 = np.quantile(np.abs(residuals), (0.5, 0.95))
    r2 = 1 - missed / spread if spread > 0 else float(missed < 1e-9)
    return Fit(tuple(names), tuple(weights.tolist()), r2, float(p50), float(p95), len(times))


def _non_negative(features: Features, times: Times) -> NDArray[np.float64]:
    """Least squares over the columns that are left after those with negative weights were dropped, one at a time."""
    scale = np.abs(features).max(0)
    scale[scale == 0] = 1.0
    kept = list(range(features.shape[1]))
    while kept:
        solution, *_ = np.linalg.lstsq(features[:, kept] / scale[kept], times, rcond=None)
        worst = int(solution.argmin())
        if solution[worst] >= 0:
            weights = np.zeros(features.shape[1])
            weights[kept] = solution / scale[kept]
            return weights
        del kept[worst]
    return np.zeros(features.shape[1])


@dataclass
class Online:
    """Recursive least squares with forgetting (Ljung, System Identification, 11.2), robust to single outliers.

    Args:
        weights: (features,) to begin with, of an offline `Fit`.
        forgetting: weight of the past at each sample; 1 forgets nothing.
    """

    weights: NDArray[np.float64]
    forgetting: float = 0.99
    samples: int = 0
    outliers: int = 0
    _covariance: NDArray[np.float64] = field(init=False)
    _usual_ms: float = field(init=False, default=0.0)
    _in_a_row: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if not 0 < self.forgetting <= 1:
            raise ValueError(f"forgetting must be above 0 and at most 1, received {self.forgetting}")
        self.weights = np.asarray(self.weights, np.float64).copy()
        self._covariance = np.diag(FIRST_UNCERTAINTY * np.maximum(self.weights, 1e-9) ** 2)

    def predict(self, features: Sequence[float]) -> float:
        """Milliseconds."""
        return float(np.dot(self.weights, features))

    def update(self, features: Sequence[float], time_ms: float) -> bool:
        """Take in a sample; False where it was an outlier and changed nothing but their count."""
        x = np.asarray(features, np.float64)
        residual = time_ms - float(self.weights @ x)
        if self._is_outlier(abs(residual)):
            self.outliers += 1
            self._in_a_row += 1
            return False
        self._in_a_row = 0
        self.samples += 1
        self._usual_ms = USUAL_DECAY * self._usual_ms + (1 - USUAL_DECAY) * abs(residual)
        leverage = self._covariance @ x
        noise = max(self._usual_ms, 1e-6) ** 2
        gain = leverage / (self.forgetting * noise + float(x @ leverage))
        self.weights = np.maximum(self.weights + gain * residual, 0.0)
        self._covariance = (self._covariance - np.outer(gain, leverage)) / self.forgetting
        return True

    def _is_outlier(self, distance_ms: float) -> bool:
        known = self.samples > len(self.weights) and self._usual_ms > 0
        return known and distance_ms > SURPRISE * self._usual_ms and self._in_a_row < STUBBORN
