"""Kinds of jobs: Gaussian mixtures over what jobs ask for (ROCK, CLUSTER '25, section 4.1). Pure.

A model is fitted by :mod:`giornata.scheduling.kinds_fit`, which needs scikit-learn. What is here needs no package:
which kind a job is of, and whether jobs have changed so much that the model should be fitted again.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from giornata.scheduling.demand import JobDemand
from giornata.scheduling.line import SchedulingParams
from giornata.wire.jobs import Priority

KEPT: Final = 600
"""Jobs that a model is fitted to."""
LATEST: Final = 200
"""Jobs that are compared with those."""
LEAST: Final = 100
"""Jobs before the first fit."""
PAUSE_S: Final = 90.0
"""Between two looks: ROCK's interval."""
THRESHOLD: Final = 0.5
"""Divergence beyond which a model is fitted again."""
SENSITIVITY_S: Final = 120.0
"""Time after which delay counts 1 - 1/e."""
PATIENT_S: Final = {2: 120.0, 3: 600.0}
"""Delay that interactive and batch jobs without a deadline are taken to tolerate."""

Features = tuple[float, float, float, float]
"""Steps; logarithm of 1 + megabytes of adapters; kind of service, 1 to 3; sensitivity to delay."""
Row = tuple[float, ...]


def features_of(demand: JobDemand, claim: SchedulingParams, now: float) -> Features:
    """What tells jobs apart. Kind 1 is interactive with a deadline, 2 interactive, 3 batch.

    Sensitivity is 1 - exp(-t / 120 s), t being the time until the deadline. It has the sign of the paper: it grows
    with the delay that is tolerated.
    """
    megabytes = sum(lora.size_bytes for lora in demand.adapters) / 1e6
    kind = 3 if claim.priority is Priority.BATCH else 2 if claim.finish_by_s is None else 1
    tolerated_s = PATIENT_S[max(2, kind)] if claim.finish_by_s is None else max(0.0, claim.finish_by_s - now)
    steps = max((shape.steps for shape in demand.shapes), default=0)
    return float(steps), math.log1p(megabytes), float(kind), sensitivity(tolerated_s)


def sensitivity(tolerated_s: float) -> float:
    """1 - exp(-t / 120 s)."""
    return 1 - math.exp(-tolerated_s / SENSITIVITY_S)


@dataclass(frozen=True)
class FeatureHistograms:
    """Marginal distributions of what a model was fitted to, in standardised units."""

    edges: tuple[Row, ...]
    """Edges of the bins of each feature, ascending; a constant feature may have none."""
    shares: tuple[Row, ...]
    """Share of each bin, by feature: one more than edges; one was added to every count, so that none is 0."""


@dataclass(frozen=True)
class JobKindModel:
    """A mixture of normal distributions of standardised features."""

    centre: Row
    scale: Row
    """A feature is standardised as (value - centre) / scale."""
    weights: Row
    """Weights of the components; they sum to 1."""
    means: tuple[Row, ...]
    factors: tuple[tuple[Row, ...], ...]
    """For each component, the upper triangular U with U @ U.T the inverse of the covariance: scikit-learn's
    `precisions_cholesky_`."""
    binned: FeatureHistograms

    @property
    def components(self) -> int:
        """How many kinds it knows."""
        return len(self.weights)

    def standardised(self, features: Sequence[float]) -> list[float]:
        """In units of the model."""
        return [
            (value - centre) / scale
            for value, centre, scale in zip(features, self.centre, self.scale, strict=True)
        ]

    def log_densities(self, features: Sequence[float]) -> list[float]:
        """Logarithm of each component's weight times its density, up to a constant that all share."""
        z = self.standardised(features)
        found = []
        for weight, mean, factor in zip(self.weights, self.means, self.factors, strict=True):
            apart = [value - middle for value, middle in zip(z, mean, strict=True)]
            log = math.log(max(weight, 1e-300))
            for column in range(len(apart)):
                projected = sum(apart[row] * factor[row][column] for row in range(column + 1))
                log += math.log(factor[column][column]) - projected * projected / 2
            found.append(log)
        return found

    def kind(self, features: Sequence[float]) -> int:
        """The likeliest component; of equals the first."""
        logs = self.log_densities(features)
        return logs.index(max(logs))

    def divergence(self, latest: Iterable[Sequence[float]]) -> float:
        """Kullback-Leibler divergence of the latest jobs from the model's, summed over binned marginals, in nats."""
        told = [self.standardised(features) for features in latest]
        total = 0.0
        for place, (edges, shares) in enumerate(zip(self.binned.edges, self.binned.shares, strict=True)):
            own = shares_of([z[place] for z in told], edges)
            total += sum(p * math.log(p / q) for p, q in zip(own, shares, strict=True))
        return total


def shares_of(values: Sequence[float], edges: Sequence[float]) -> Row:
    """Share of each bin, with one added to every count. Values on an edge belong to the bin above it."""
    counts = [1.0] * (len(edges) + 1)
    for value in values:
        counts[bisect_right(edges, value)] += 1
    total = sum(counts)
    return tuple(count / total for count in counts)


class RecentJobs:
    """The latest jobs, and when a model of them should be fitted. Times are seconds on one clock."""

    def __init__(self) -> None:
        self._latest: deque[Features] = deque(maxlen=KEPT)
        self._looked_s = -math.inf
        self.model: JobKindModel | None = None
        """None until one is fitted: all jobs are of one kind."""

    def see(self, features: Features) -> None:
        """A job has come."""
        self._latest.append(features)

    def kind(self, features: Features) -> int:
        """The kind of a job, by the present model; 0 until there is one."""
        return 0 if self.model is None else self.model.kind(features)

    def to_fit(self, now: float) -> tuple[Features, ...] | None:
        """The jobs that a model should be fitted to now; None where it need not. Looks every :data:`PAUSE_S`."""
        if len(self._latest) < LEAST or now - self._looked_s < PAUSE_S:
            return None
        self._looked_s = now
        if self.model is not None:
            latest = islice(self._latest, max(0, len(self._latest) - LATEST), None)
            if self.model.divergence(latest) <= THRESHOLD:
                return None
        return tuple(self._latest)
