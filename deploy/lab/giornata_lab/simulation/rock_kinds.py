"""ROCK's queues of alike jobs (CLUSTER '25, section 4.1): kinds of jobs, the line of their turns, and workers. Pure."""

from __future__ import annotations

import math
import warnings
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

import numpy as np

from giornata.scheduling.demand import JobDemand
from giornata.scheduling.placement import Placement
from giornata.scheduling.queue import AGEING_S, Key, QueuedRows, RowQueue, SchedulingParams
from giornata.scheduling.scheduler import LOOKED_AT, RowAssignment, SchedulingDecision, room_for_any
from giornata.wire.jobs import Priority
from giornata.wire.workers import Tier

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


class JobKindQueue(RowQueue):
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


# ROCK's scheduler: queues of alike jobs are matched with workers (CLUSTER '25, section 4.1). Pure.
#
# The paper matches each queue with one worker for 90 s, which carries no load: here queues are matched anew
# at each free place. The heaviest pair of a queue and a free worker is served, but a queue whose first job
# has waited for a minute comes first.


AFFINITY: Final = 0.6
UTILISATION: Final = 0.3
DELAY: Final = 0.1
"""Weights of the three terms."""
WANTED: Final = 0.7
"""Utilisation that a worker should have."""
BEST: Final = 3
"""Workers among which the least deviation of utilisations decides."""


class FreeWorker(NamedTuple):
    """A worker with a free place, as one queue sees it."""

    name: str
    affinity: float
    """Share of the queue's adapters that its device has, 0 to 1."""
    utilisation: float
    """Rows over places."""
    delay_ms: float
    """Time until the queue's first rows would be computed there, above 0."""


def match_weights(workers: Sequence[FreeWorker]) -> dict[str, float]:
    """0.6 of affinity, 0.3 of 1 - |u - 0.7|, 0.1 of the inverse delay, by name of the worker.

    The delay's inverse is relative to that of the best worker. Taken in 1/seconds, as it is printed, it vanishes beside
    the other terms.
    """
    least_ms = min((worker.delay_ms for worker in workers), default=0.0)
    return {
        worker.name: AFFINITY * worker.affinity
        + UTILISATION * (1 - abs(worker.utilisation - WANTED))
        + DELAY * (least_ms / worker.delay_ms if worker.delay_ms > 0 else 1.0)
        for worker in workers
    }


def choose_worker(workers: Sequence[FreeWorker]) -> FreeWorker:
    """The one of the three heaviest workers with which utilisations deviate least: the least utilised."""
    weighed = match_weights(workers)
    best = sorted(workers, key=lambda worker: (-weighed[worker.name], worker.name))[:BEST]
    return min(best, key=lambda worker: (worker.utilisation, -weighed[worker.name], worker.name))


OLD_S: Final = 60.0
"""A queue whose first job has waited for so long comes first."""
ASKED: Final = 32
"""Waiting jobs of a queue whose adapters are its affinity."""


def queues_of(line: RowQueue, now: float) -> dict[int, list[QueuedRows]]:
    """Entries by queue of a line that knows kinds; those of any other line are one queue, or none."""
    if isinstance(line, JobKindQueue):
        return line.queues(now)
    return {0: waiting} if (waiting := line.order(now)) else {}


def affinity(wanted: Collection[str], held: Mapping[str, Tier]) -> float:
    """Share of the `wanted` adapters that are `held` on the device; 0 where none is wanted."""
    return sum(held.get(digest) is Tier.DEVICE for digest in wanted) / len(wanted) if wanted else 0.0


@dataclass(frozen=True)
class RockScheduler:
    """Serves the heaviest pair of queue and free worker."""

    def decide(self, line: RowQueue, placement: Placement, now: float) -> SchedulingDecision:
        """See :class:`giornata.scheduling.scheduler.Scheduler`."""
        if not room_for_any(line, placement):
            return SchedulingDecision()
        with placement.trial() as count:
            made = _RockDecisionBuilder(placement, count, now, queues_of(line, now), line)
            while made.serve_one():
                pass
        return SchedulingDecision(made.placements, wake_at=line.changes_at(now) if made.queues else None)


@dataclass
class _QueueMatch:
    """A queue's first rows, and the workers that have a place for them."""

    queue: int
    entry: QueuedRows
    asked: JobDemand
    workers: list[FreeWorker]


@dataclass
class _RockDecisionBuilder:
    """A decision in the making."""

    placement: Placement
    count: Callable[[str, str, JobDemand], None]
    now: float
    queues: dict[int, list[QueuedRows]]
    """Entries that wait, by queue; a queue without any is left out."""
    line: RowQueue
    placed: dict[tuple[Key, str], list[int]] = field(default_factory=dict)
    """Rows by entry and worker."""
    kept: dict[str, Key] = field(default_factory=dict)
    """Workers that are kept free, each for an old entry that no worker has room for."""

    @property
    def placements(self) -> tuple[RowAssignment, ...]:
        """Return what one worker gets of an entry together, in the order of the first rows."""
        return tuple(RowAssignment(key, worker, tuple(rows)) for (key, worker), rows in self.placed.items())

    def serve_one(self) -> bool:
        """Place the first rows of one queue; False where none can be."""
        yields = min((self._yields(entries[0]) for entries in self.queues.values()), default=True)
        pairs = [
            pair
            for queue, entries in self.queues.items()
            if self._yields(entries[0]) == yields and (pair := self._pair(queue, entries[0])) is not None
        ]
        if not pairs:
            return self._let_batch_come(yields=yields)
        old = [pair for pair in pairs if self.now - pair.entry.since_s > OLD_S]
        first = min(old, key=lambda pair: pair.entry.key[1]) if old else max(pairs, key=_heaviest)
        self._place(first, choose_worker(first.workers).name)
        return True

    def _yields(self, entry: QueuedRows) -> bool:
        return isinstance(self.line, JobKindQueue) and self.line.yields(entry, self.now)

    def _let_batch_come(self, *, yields: bool) -> bool:
        """No interactive queue can be served: drop them from this decision, so that batch jobs are asked."""
        before = len(self.queues)
        self.queues = {q: entries for q, entries in self.queues.items() if self._yields(entries[0]) != yields}
        return bool(self.queues) and len(self.queues) < before and not yields

    def _pair(self, queue: int, entry: QueuedRows) -> _QueueMatch | None:
        asked = entry.asked(self.now).piece()
        closed = [name for name, key in self.kept.items() if key != entry.key]
        known = self.placement.candidates(asked, LOOKED_AT, closed)
        able = [c for c in known if asked.fits(c.rows, c.capacity_rows)]
        if not able:
            if self.now - entry.since_s > OLD_S and entry.key not in self.kept.values():
                soonest = self.placement.soonest(asked, closed)
                self.kept |= {} if soonest is None else {soonest: entry.key}
            return None
        wanted = {lora.digest for one in self.queues[queue][:ASKED] for lora in one.demand.adapters}
        workers = [
            FreeWorker(
                c.instance,
                affinity(wanted, self.placement.adapters(c.instance)),
                c.rows / c.capacity_rows,
                c.prediction().finish_ms,
            )
            for c in able
        ]
        return _QueueMatch(queue, entry, asked, workers)

    def _place(self, pair: _QueueMatch, worker: str) -> None:
        entry, entries = pair.entry, self.queues[pair.queue]
        rows = entry.rows[: pair.asked.rows]
        self.count(entry.job_id, worker, pair.asked)
        self.placed.setdefault((entry.key, worker), []).extend(rows)
        if len(rows) < len(entry.rows):
            entries[0] = entry.without(rows)
            return
        del entries[0]
        if not entries:
            del self.queues[pair.queue]


def _heaviest(pair: _QueueMatch) -> tuple[float, int]:
    """Weight of the queue with its best worker; of equal ones the older job's."""
    return max(match_weights(pair.workers).values()), -pair.entry.key[1]


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
