"""From times to weights and caps. Pure.

Residuals are relative: an absolute fit is one to the largest batches alone, whose residuals outweigh all others, and
misses a single small row, which is most of what is served, by more than it takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from giornata.planning.costing import Array, BatchCap, Fit, fit, graded
from giornata.planning.costs import COMPUTE, LOAD

ENOUGH: Final = 0.95
"""A batch cap reaches this share of the best throughput."""
FOLDS: Final = 5


class Sample(NamedTuple):
    """One thing measured."""

    features: tuple[float, ...]
    ms: float

    @classmethod
    def of_load(cls, size_bytes: int, ms: float) -> Sample:
        """A load that moved `size_bytes`."""
        return cls((1.0, float(size_bytes)), ms)


class Predicted(NamedTuple):
    """One thing measured, beside what a fit says."""

    predicted_ms: float
    measured_ms: float

    @property
    def error(self) -> float:
        """The error as a share of the measured time; positive where the fit says more."""
        return self.predicted_ms / self.measured_ms - 1


def compute_fit(samples: Sequence[Sample]) -> Fit:
    """Over :data:`giornata.planning.costs.COMPUTE`; ValueError where samples are fewer than features."""
    return fit(COMPUTE, *_arrays(samples), relative=True)


def load_fit(samples: Sequence[Sample]) -> Fit:
    """Over :data:`giornata.planning.costs.LOAD`; ValueError as above."""
    return fit(LOAD, *_arrays(samples), relative=True)


def predictions(found: Fit, samples: Iterable[Sample]) -> list[Predicted]:
    """What a fit says of `samples`, in their order."""
    return [Predicted(found.predict(sample.features), sample.ms) for sample in samples]


def unseen(names: Sequence[str], samples: Sequence[Sample]) -> Fit:
    """How good fits are on samples that they have not seen: each fifth is predicted by a fit to the others.

    Raises:
        ValueError: four fifths of the samples are fewer than features.
    """
    features, times = _arrays(samples)
    fold = np.arange(len(times)) % FOLDS
    said = np.zeros(len(times))
    for one in range(min(FOLDS, len(times))):
        others = fit(names, features[fold != one], times[fold != one], relative=True)
        said[fold == one] = features[fold == one] @ np.asarray(others.weights)
    return graded(("predicted",), np.ones(1), said[:, None], times)


def caps(measured: Iterable[tuple[int, int, float]]) -> tuple[BatchCap, ...]:
    """The smallest batch of every size of row whose throughput reaches :data:`ENOUGH` of the best.

    Args:
        measured: tokens that a row computes, rows of that size, ms of their step.
    """
    throughput: dict[int, dict[int, float]] = defaultdict(dict)
    for tokens, rows, ms in measured:
        throughput[tokens][rows] = max(rows / ms, throughput[tokens].get(rows, 0.0))
    found = []
    for tokens, by_rows in sorted(throughput.items()):
        best = max(by_rows.values())
        found.append(
            BatchCap(tokens=tokens, rows=min(rows for rows, pace in by_rows.items() if pace >= ENOUGH * best))
        )
    return tuple(found)


def _arrays(samples: Sequence[Sample]) -> tuple[Array, Array]:
    """(samples, features) and (samples,)."""
    return np.array([sample.features for sample in samples]), np.array([sample.ms for sample in samples])
