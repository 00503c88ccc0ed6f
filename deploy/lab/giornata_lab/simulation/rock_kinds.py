"""ROCK's queues of alike jobs (CLUSTER '25, section 4.1): kinds of jobs, and the line of their turns. Pure."""

from __future__ import annotations

import math
import warnings
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np

from giornata.scheduling.demand import JobDemand
from giornata.scheduling.queue import AGEING_S, Key, QueuedRows, RowQueue, RowQueueBase, SchedulingParams
from giornata.scheduling.rock import RockScheduler, never_yields, one_queue
from giornata.scheduling.scheduler import LOOKED_AT
from giornata.wire.jobs import Priority

# Kinds of jobs: Gaussian mixtures over what jobs ask for (ROCK, CLUSTER '25, section 4.1). Pure.
#


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
    """Return what tells jobs apart. Kind 1 is interactive with a deadline, 2 interactive, 3 batch.

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
        """Return how many kinds it knows."""
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


# A line in which queues of alike jobs take turns by the work that each was served (ROCK, section 4.1).
# Pure.


CREDIT_S: Final = 60.0
"""A queue that was empty has at most so much less work served than the others: it does not hold them up for long."""


class JobKindQueue(RowQueueBase):
    """See :class:`giornata.scheduling.queue.RowQueue`.

    Jobs are of one kind until a model is given; then each queue has its jobs in the order of their arrival. Batch jobs
    come after interactive ones until they have waited for a while. Tenants and deadlines do not count, as in ROCK.
    """

    def __init__(self, *, ageing_s: float = AGEING_S) -> None:
        super().__init__()
        self._ageing_s = ageing_s
        self._seen = RecentJobs()
        self._features: dict[Key, Features] = {}
        self._queues: dict[Key, int] = {}
        self._sizes: Counter[int] = Counter()
        """Entries, by queue that has any."""
        self._work_s: defaultdict[int, float] = defaultdict(float)
        """Served, by queue."""

    def to_fit(self, now: float) -> tuple[Features, ...] | None:
        """The jobs that a model should be fitted to now; None where it need not."""
        return self._seen.to_fit(now)

    def use(self, model: JobKindModel) -> None:
        """Sort jobs by `model` from now on, those that wait too; work that was served is forgotten."""
        self._seen.model = model
        self._queues = {key: model.kind(features) for key, features in self._features.items()}
        self._sizes = Counter(self._queues.values())
        self._work_s.clear()

    def queues(self, now: float) -> dict[int, list[QueuedRows]]:
        """Entries by queue, each in the order of its turns."""
        found = defaultdict[int, list[QueuedRows]](list)
        for entry in sorted(self, key=lambda entry: (self.yields(entry, now), entry.key[1])):
            found[self._queues[entry.key]].append(entry)
        return dict(found)

    def order(self, now: float) -> list[QueuedRows]:
        """See :class:`giornata.scheduling.queue.RowQueue`."""
        queues = self.queues(now)
        work_s = {queue: self._work_s[queue] for queue in queues}
        ordered, places = list[QueuedRows](), dict.fromkeys(queues, 0)
        while len(ordered) < len(self):
            waiting = (queue for queue in queues if places[queue] < len(queues[queue]))
            queue = min(
                waiting, key=lambda one: (self.yields(queues[one][places[one]], now), work_s[one], one)
            )
            entry = queues[queue][places[queue]]
            places[queue] += 1
            work_s[queue] += _work_s(entry.takes_s, entry.demand.steps)
            ordered.append(entry)
        return ordered

    def changes_at(self, now: float) -> float | None:
        """See :class:`giornata.scheduling.queue.RowQueue`."""
        batch = (entry for entry in self if entry.claim.priority is Priority.BATCH)
        return min((at_s for entry in batch if (at_s := entry.since_s + self._ageing_s) > now), default=None)

    def yields(self, entry: QueuedRows, now: float) -> bool:
        """Return whether it comes after all interactive jobs: it is a batch job that has not aged."""
        return entry.claim.priority is Priority.BATCH and now - entry.since_s < self._ageing_s

    def _joined(self, entry: QueuedRows, now: float) -> None:
        features = self._features[entry.key] = features_of(entry.demand, entry.claim, now)
        self._seen.see(features)
        queue = self._queues[entry.key] = self._seen.kind(features)
        if self._sizes and not self._sizes[queue]:
            most_s = max(self._work_s[other] for other, size in self._sizes.items() if size)
            self._work_s[queue] = max(self._work_s[queue], most_s - CREDIT_S)
        self._sizes[queue] += 1

    def _served(self, entry: QueuedRows, served: JobDemand, now: float, *, whole: bool) -> None:  # noqa: ARG002
        takes_s = entry.claim.takes_s * served.rows
        self._work_s[self._queues[entry.key]] += _work_s(takes_s, served.steps)

    def _left(self, entry: QueuedRows) -> None:
        del self._features[entry.key]
        self._sizes[self._queues.pop(entry.key)] -= 1
        self._sizes += Counter()  # drops zeros


def _work_s(takes_s: float, steps: int) -> float:
    """Time of work; where no speed is known, a step counts as a tenth of a second."""
    return takes_s or steps / 10


# ROCK's scheduler on these queues.


def kind_queues(line: RowQueue, now: float) -> dict[int, list[QueuedRows]]:
    """Return the queues of a line that knows kinds; any other one is one queue."""
    return line.queues(now) if isinstance(line, JobKindQueue) else one_queue(line, now)


def yields_by_kind(line: RowQueue, entry: QueuedRows, now: float) -> bool:
    """Return whether an entry comes after all interactive jobs, where the line knows kinds."""
    return line.yields(entry, now) if isinstance(line, JobKindQueue) else never_yields(line, entry, now)


def kinds_scheduler(looked_at: int = LOOKED_AT) -> RockScheduler:
    """Return ROCK's scheduler as published: it matches queues of alike jobs."""
    return RockScheduler(looked_at, kind_queues, yields_by_kind)


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
    from sklearn.exceptions import ConvergenceWarning  # noqa: PLC0415 - takes a second to import
    from sklearn.mixture import GaussianMixture  # noqa: PLC0415 - likewise

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
