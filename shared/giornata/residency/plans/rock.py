"""ROCK's placement and its baseline `proactive` (CLUSTER 2025, section 4): replicas by popularity and size. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random
from typing import Final

from giornata.residency.plans.use_based import (
    AdapterSelection,
    AdapterTier,
    ResidencySnapshot,
    TierKind,
    Wanted,
    pins_of,
)
from giornata.residency.popularity import AdapterUsage, rendezvous_weight

# Clusters of places by their hardware, as ROCK makes them (section 4). Imports scikit-learn where it is
# needed.


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
    import numpy as np  # noqa: PLC0415 - with the extra alone, as the next
    from sklearn.cluster import DBSCAN  # noqa: PLC0415 - takes seconds

    totals = np.array([(place.budget_bytes, place.bytes_per_s, place.speed) for place in known], float)
    span = np.ptp(totals, axis=0)
    scaled = (totals - totals.min(0)) / np.where(span > 0, span, 1.0)
    labels = DBSCAN(eps=RADIUS, min_samples=NEIGHBOURS).fit(scaled).labels_
    found: dict[int, list[AdapterTier]] = {}
    for place, label in zip(known, labels, strict=True):
        found.setdefault(int(label), []).append(place)
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
BEST: Final = 3
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
            best = sorted(room, key=lambda name: (-self._score(name, digest), name))[:BEST]
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


# The baseline `proactive` of ROCK's evaluation: what was popular lately is loaded wherever it fits. Pure.


PROACTIVE_PERIOD_S: Final = 60.0
"""How often it plans."""
PROACTIVE_HALF_LIFE_S: Final = 600.0
"""Half-life of the uses that it is given."""
SHARE: Final = 0.5
"""Share of each tier that it fills."""
LEAST_USES: Final = 0.05
"""Below it, an adapter is not popular: one use, 43 minutes ago."""


def proactive_plan(observed: ResidencySnapshot, uses: AdapterUsage, now: float) -> Wanted:
    """The most popular adapters, as many as fit into half of each place."""
    counted = {digest: n for digest in observed.sizes if (n := uses.lately(digest, now)) >= LEAST_USES}
    popular = sorted(counted, key=lambda digest: (-counted[digest], digest))
    wanted = {}
    for place in observed.places:
        filling = AdapterSelection(place, observed.sizes, pins_of(place, observed), SHARE)
        for digest in popular:
            filling.take(digest)
        wanted[place.name] = filling.chosen
    return wanted
