"""Least squares without negative weights (Lawson and Hanson's), and how good they are. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

Array = NDArray[np.float64]


class LinearFit(BaseModel):
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
    derived: tuple[str, ...] = ()
    """Names of weights that nothing measured tells: they follow from the others."""

    def predict(self, features: Sequence[float]) -> float:
        """Milliseconds."""
        return float(np.dot(self.weights, features))


def solver() -> Any:
    """Lawson and Hanson's solver. Asking for it loads it, for half a second: a step and a request find it loaded."""
    return scipy.optimize.nnls


def fit(names: Sequence[str], features: Array, times: Array, *, relative: bool = False) -> LinearFit:
    """Least squares without negative weights.

    Args:
        names: one a feature.
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
    weights = solver()(weighed / scale, times * emphasis)[0] / scale
    return graded(names, weights, features, times)


def graded(names: Sequence[str], weights: Array, features: Array, times: Array) -> LinearFit:
    """Grade `weights`, (features,) ms per unit, on `features`, (samples, features), and `times`, (samples,) ms."""
    residuals = times - features @ weights
    shares = np.abs(residuals) / np.maximum(np.abs(times), np.finfo(np.float64).tiny)
    p50, p95 = np.quantile(np.abs(residuals), (0.5, 0.95)).tolist()
    error_p50, error_p95 = np.quantile(shares, (0.5, 0.95)).tolist()
    return LinearFit(
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
