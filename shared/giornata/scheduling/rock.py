"""The plans of adapters' placement, and ROCK (CLUSTER '25, section 4) beside the default. Pure.

ROCK's matching and replicas run on the common queue, cache tiers and placement; its queues of alike jobs are the lab's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from random import Random
from typing import Final, NamedTuple

from giornata.residency.use_based import (
    HALF_LIFE_S,
    USE_PERIOD_S,
    AdapterSelection,
    AdapterTier,
    AdapterUsage,
    Plan,
    ResidencySnapshot,
    TierKind,
    Wanted,
    pins_of,
    rendezvous_weight,
    use_plan,
)
from giornata.scheduling.demand import JobDemand
from giornata.scheduling.policies import CandidateWorker, with_room

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


def choose_worker(workers: Sequence[FreeWorker]) -> FreeWorker | None:
    """The one of the three heaviest workers with which utilisations deviate least: the least utilised."""
    if not workers:
        return None
    weighed = match_weights(workers)
    best = sorted(workers, key=lambda worker: (-weighed[worker.name], worker.name))[:BEST]
    return min(best, key=lambda worker: (worker.utilisation, -weighed[worker.name], worker.name))


def rock_match(candidates: Sequence[CandidateWorker], demand: JobDemand) -> CandidateWorker | None:
    """The policy that matches a job with a worker that has room, by the affinity of its own LoRAs.

    The router has one queue; ROCK's queues of alike jobs are the lab's.
    """
    able = {c.instance: c for c in with_room(candidates, demand)}
    free = [
        FreeWorker(c.instance, c.held, c.rows / c.capacity_rows, c.prediction().finish_ms)
        for c in able.values()
    ]
    best = choose_worker(free)
    return None if best is None else able[best.name]


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


# ROCK's placement (Zhang et al., "ROCK", CLUSTER 2025, section 4): replicas by popularity and size.
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


class AdapterPlan(StrEnum):
    """The name of a plan in configurations and simulations."""

    ROCK = "rock"
    """ROCK's replicas, beside its matching."""
    USE = "use"
    """What is used most for what another load costs; see :mod:`giornata.residency.use_based`."""
    OFF = "off"
    """None: adapters come as jobs need them."""


class ResidencyPlanner(NamedTuple):
    """A rule and its times."""

    make: Callable[[int], Plan]
    """The plan of a seed."""
    period_s: float
    half_life_s: float = HALF_LIFE_S
    """Half-life of the uses that the plan is given."""


PLANNERS: Final[Mapping[str, ResidencyPlanner]] = {
    AdapterPlan.ROCK: ResidencyPlanner(RockPlan, ROCK_PERIOD_S),
    AdapterPlan.USE: ResidencyPlanner(lambda _: use_plan, USE_PERIOD_S),
}
"""All but `off`."""
