"""ROCK as published (CLUSTER '25, section 4), beside the default: matching of jobs with workers, and replicas. Pure.

Both run on the common queue, cache tiers and placement. Its queues of alike jobs are the lab's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, NamedTuple

from giornata.residency.use_based import (
    AdapterSelection,
    AdapterTier,
    AdapterUsage,
    ResidencySnapshot,
    TierKind,
    Wanted,
    pins_of,
    rendezvous_weight,
)
from giornata.scheduling.demand import JobDemand
from giornata.scheduling.placement import Placement
from giornata.scheduling.queue import Key, QueuedRows, RowQueue
from giornata.scheduling.scheduler import LOOKED_AT, RowAssignment, SchedulingDecision, room_for_any
from giornata.wire.workers import Tier

# ROCK's matching of queues and workers: weights, and the choice among the best (CLUSTER '25, section 4.1).
# Pure.


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


def affinity(wanted: Collection[str], held: Mapping[str, Tier]) -> float:
    """Share of the `wanted` adapters that are `held` on the device; 0 where none is wanted."""
    return sum(held.get(digest) is Tier.DEVICE for digest in wanted) / len(wanted) if wanted else 0.0


def match_weight(worker: FreeWorker, least_delay_ms: float) -> float:
    """0.6 of affinity, 0.3 of 1 - |u - 0.7|, 0.1 of the inverse delay.

    The delay's inverse is relative to that of the best worker. Taken in 1/seconds, as it is printed, it vanishes beside
    the other terms.
    """
    fit = 1 - abs(worker.utilisation - WANTED)
    return (
        AFFINITY * worker.affinity
        + UTILISATION * fit
        + DELAY * (least_delay_ms / worker.delay_ms if worker.delay_ms > 0 else 1.0)
    )


def match_weights(workers: Sequence[FreeWorker]) -> dict[str, float]:
    """By name of the worker."""
    least_ms = min((worker.delay_ms for worker in workers), default=0.0)
    return {worker.name: match_weight(worker, least_ms) for worker in workers}


def choose_worker(workers: Sequence[FreeWorker]) -> FreeWorker | None:
    """The one of the three heaviest workers with which utilisations deviate least: the least utilised."""
    if not workers:
        return None
    weighed = match_weights(workers)
    best = sorted(workers, key=lambda worker: (-weighed[worker.name], worker.name))[:BEST]
    return min(best, key=lambda worker: (worker.utilisation, -weighed[worker.name], worker.name))


# ROCK's scheduler: queues of alike jobs are matched with workers (CLUSTER '25, section 4.1). Pure.
#
# The paper matches each queue with one worker for 90 s, which carries no load: here queues are matched anew
# at each free place. The heaviest pair of a queue and a free worker is served, but a queue whose first job
# has waited for a minute comes first.


OLD_S: Final = 60.0
"""A queue whose first job has waited for so long comes first."""
ASKED: Final = 32
"""Waiting jobs of a queue whose adapters are its affinity."""


def one_queue(line: RowQueue, now: float) -> dict[int, list[QueuedRows]]:
    """Return all entries as one queue, in the order of their turns; none where nothing waits."""
    return {0: waiting} if (waiting := line.order(now)) else {}


def never_yields(_line: RowQueue, _entry: QueuedRows, _now: float) -> bool:
    """Return False: the order of the one queue has batch jobs where they belong."""
    return False


@dataclass(frozen=True)
class RockScheduler:
    """Serves the heaviest pair of queue and free worker. `queues` parts what waits; as served it is one."""

    looked_at: int = LOOKED_AT
    queues: Callable[[RowQueue, float], dict[int, list[QueuedRows]]] = one_queue
    yields: Callable[[RowQueue, QueuedRows, float], bool] = never_yields
    """Whether an entry comes after all interactive jobs of other queues."""

    def decide(self, line: RowQueue, placement: Placement, now: float) -> SchedulingDecision:
        """See :class:`giornata.scheduling.scheduler.Scheduler`."""
        if not room_for_any(line, placement):
            return SchedulingDecision()
        with placement.trial() as count:
            made = _RockDecisionBuilder(self, placement, count, now, self.queues(line, now), line)
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

    rules: RockScheduler
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
        worker = choose_worker(first.workers)
        if worker is None:
            raise RuntimeError(f"queue {first.queue} was matched without a worker")
        self._place(first, worker.name)
        return True

    def _yields(self, entry: QueuedRows) -> bool:
        return self.rules.yields(self.line, entry, self.now)

    def _let_batch_come(self, *, yields: bool) -> bool:
        """No interactive queue can be served: drop them from this decision, so that batch jobs are asked."""
        before = len(self.queues)
        self.queues = {q: entries for q, entries in self.queues.items() if self._yields(entries[0]) != yields}
        return bool(self.queues) and len(self.queues) < before and not yields

    def _pair(self, queue: int, entry: QueuedRows) -> _QueueMatch | None:
        asked = entry.asked(self.now).piece()
        closed = [name for name, key in self.kept.items() if key != entry.key]
        known = self.placement.candidates(asked, self.rules.looked_at, closed)
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


# Clusters of places by their hardware, as ROCK makes them (section 4).


RADIUS: Final = 0.25
NEIGHBOURS: Final = 6
"""Radius and neighbours of DBSCAN, `eps` and `min_samples`, as published."""
LEAST_PLACES: Final = 12
"""Fewer are one cluster: two of them could not both have a core."""


def clusters(places: Sequence[AdapterTier]) -> list[list[AdapterTier]]:
    """Places by cluster: DBSCAN over budget, bandwidth and speed, each scaled to [0, 1]; noise is a cluster, too.

    Totals, not what is free: with that, places of one kind would be noise. In the order of the places' names.
    """
    known = sorted(places, key=lambda place: place.name)
    if len(known) < LEAST_PLACES:
        return [known] if known else []
    totals = list(zip(*((one.budget_bytes, one.bytes_per_s, one.speed) for one in known), strict=True))
    spans = [(min(values), (max(values) - min(values)) or 1.0) for values in totals]
    scaled = [
        [(x - low) / span for x, (low, span) in zip(row, spans, strict=True)]
        for row in zip(*totals, strict=True)
    ]
    near = [[j for j, other in enumerate(scaled) if math.dist(point, other) <= RADIUS] for point in scaled]
    labels = [-1] * len(known)
    for first, others in enumerate(near):
        ahead = [first] if labels[first] == -1 and len(others) >= NEIGHBOURS else []
        label = max(labels) + 1
        while ahead:
            one = ahead.pop()
            labels[one] = label
            if len(near[one]) >= NEIGHBOURS:
                ahead += [other for other in near[one] if labels[other] == -1]
    found: dict[int, list[AdapterTier]] = {}
    for place, label in zip(known, labels, strict=True):
        found.setdefault(label, []).append(place)
    return [found[label] for label in sorted(found)]


# ROCK's placement (Zhang et al., "ROCK", CLUSTER 2025, section 4): replicas by popularity and size. Pure.
#
# What the paper leaves open is decided here: an adapter's cluster and partition are those that its hash
# names, a partition begins at a place of its own and has as many places as its part of the uses; a place
# scores by bandwidth times free share over hops; two adapters come together where one is used with the
# other in over half of at least four uses.


ROCK_PERIOD_S: Final = 45.0
"""How often it plans."""
WINDOW_S: Final = 45.0
"""Length of the window in which uses count."""
FULL: Final = 0.85
"""Part of a tier beyond which the least recently used goes."""
PARTITION: Final = 4
"""Places of a cluster for each partition of its adapters."""
PLACES_DRAWN: Final = 3
"""Places of which one is drawn."""
TOGETHER_USES: Final = 4
TOGETHER_SHARE: Final = 0.5
"""What is used so often, and in more than this share of its uses with another, brings the other along."""
GB_S: Final = 1e9


def replica_count(count: int, size_bytes: float, mean_bytes: float) -> int:
    """R = floor(1.5 f^0.6 sqrt(s / s̄)), as published: `count` uses in the window, bytes, and their mean."""
    return int(1.5 * math.pow(count, 0.6) * math.sqrt(size_bytes / mean_bytes))


class RockPlan:
    """A plan; its draws depend on `seed`, the adapter and the replica alone."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def __call__(self, observed: ResidencySnapshot, uses: AdapterUsage, now: float) -> Wanted:
        """For devices and for hosts, each kind by itself, the replicas of what was used in the window."""
        wanted: dict[str, tuple[str, ...]] = {}
        for kind in TierKind:
            places = [place for place in observed.places if place.kind is kind]
            wanted |= _Round(self._seed, observed, places, uses, now).plan()
        return wanted


class _Round:
    """One round for places of one kind. What is held comes first, so that a plan that is carried out stays."""

    def __init__(
        self,
        seed: int,
        observed: ResidencySnapshot,
        places: Sequence[AdapterTier],
        uses: AdapterUsage,
        now: float,
    ) -> None:
        self._seed, self._observed, self._uses = seed, observed, uses
        counts = uses.counts(WINDOW_S, now)
        self._counts = {digest: n for digest, n in counts.items() if digest in observed.sizes}
        self._together = uses.together(WINDOW_S, now)
        self._hot = sorted(self._counts, key=lambda digest: (-self._counts[digest], digest))
        self._places = {place.name: place for place in sorted(places, key=lambda place: place.name)}
        self._fillings = {
            name: AdapterSelection(place, observed.sizes, pins_of(place, observed), FULL)
            for name, place in self._places.items()
        }

    def plan(self) -> Wanted:
        """Used adapters stay where they are; replicas come; partners come; of the rest, the latest used stay."""
        for digest in self._hot:
            for name, place in self._places.items():
                if digest in place.held:
                    self._fillings[name].take(digest)
        for digest, members in self._members():
            self._replicate(digest, members)
        self._bring_partners()
        latest = {digest: age for age, digest in enumerate(self._uses.known())}
        for name, place in self._places.items():
            for digest in sorted(place.held, key=lambda digest: (-latest.get(digest, -1), digest)):
                self._fillings[name].take(digest)
        return {name: filling.chosen for name, filling in self._fillings.items()}

    def _members(self) -> Iterator[tuple[str, list[str]]]:
        """Each used adapter, and the places of its partition."""
        found = [[place.name for place in cluster] for cluster in clusters(tuple(self._places.values()))]
        if not found:
            return
        parts: dict[str, tuple[int, int]] = {}
        heat = Counter[tuple[int, int]]()
        for digest in self._hot:
            cluster = rendezvous_weight("cluster", digest) % len(found)
            part = rendezvous_weight("partition", digest) % max(1, len(found[cluster]) // PARTITION)
            parts[digest] = cluster, part
            heat[parts[digest]] += self._counts[digest]
        total = sum(heat.values())
        for digest in self._hot:
            names = found[parts[digest][0]]
            most = min(len(names), int(heat[parts[digest]] / total * len(names)) + 1)
            first = parts[digest][1] * PARTITION
            yield digest, [names[(first + place) % len(names)] for place in range(most)]

    def _replicate(self, digest: str, members: Sequence[str]) -> None:
        sizes = self._observed.sizes
        mean_bytes = sum(sizes.values()) / len(sizes)
        wanted = min(
            len(self._places), replica_count(self._counts[digest], sizes[digest], max(1.0, mean_bytes))
        )
        have = sum(digest in filling for filling in self._fillings.values())
        while have < wanted:
            room = [
                name
                for name in members
                if digest not in self._fillings[name] and self._fillings[name].fits(digest)
            ]
            if not room:
                return
            best = sorted(room, key=lambda name: (-self._score(name, digest), name))[:PLACES_DRAWN]
            weights = [self._score(name, digest) ** 2 for name in best]
            draw = Random(rendezvous_weight(str(self._seed), digest, str(have)))  # noqa: S311 - no secret
            chosen = draw.choices(best, weights)[0] if any(weights) else best[0]
            self._fillings[chosen].take(digest)
            have += 1

    def _score(self, name: str, digest: str) -> float:
        """Bandwidth times free share over hops: one where the place's host has the adapter, two from the store."""
        place = self._places[name]
        free = max(0.0, 1.0 - place.used_bytes / max(1, place.budget_bytes))
        near = any(
            other.kind is TierKind.HOST and other.host == place.host and digest in other.held
            for other in self._observed.places
        )
        return place.bytes_per_s / GB_S * free / (1 if near else 2)

    def _bring_partners(self) -> None:
        """Return what is mostly used with an adapter comes to its places, and so on."""
        partners: dict[str, list[str]] = {}
        for (one, other), count in sorted(self._together.items()):
            for digest, partner in ((one, other), (other, one)):
                used = self._counts.get(digest, 0)
                if used >= TOGETHER_USES and count > TOGETHER_SHARE * used:
                    partners.setdefault(digest, []).append(partner)
        for filling in self._fillings.values():
            asked = [digest for digest in filling.chosen if digest in self._counts]
            for digest in asked:  # it grows
                come = (partner for partner in partners.get(digest, ()) if partner not in filling)
                asked.extend(partner for partner in come if filling.take(partner))
