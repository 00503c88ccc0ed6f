"""The plans of adapters' placement that are simulated: the one that serves, ROCK's and Proactive's. Pure."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from random import Random
from typing import Final, NamedTuple

from giornata.residency.use_based import (
    HALF_LIFE_S,
    USE_PERIOD_S,
    AdapterTier,
    AdapterUsage,
    ResidencySnapshot,
    Wanted,
    rendezvous_weight,
    use_plan,
)


class TierKind(StrEnum):
    """The tiers that adapters can be in."""

    HOST = "host"
    """The memory of a machine."""
    DEVICE = "device"
    """The device of one worker, filled from its host."""


@dataclass(frozen=True)
class SimTier(AdapterTier):
    """A tier of a host or of a device, which a plan may fill."""

    kind: TierKind = TierKind.HOST
    host: str = ""
    bytes_per_s: float = 1e9
    """Bandwidth of the link that fills it."""
    speed: float = 1.0
    """How fast its workers compute, to compare places."""

    @property
    def used_bytes(self) -> int:
        """Bytes of what it has."""
        return sum(self.held.values())


class SimResidency(NamedTuple):
    """All tiers, and the bytes of every adapter by digest."""

    places: tuple[SimTier, ...]
    sizes: Mapping[str, int]


class WindowedUsage(AdapterUsage):
    """Uses of adapters that are also counted in a window, of `window_s` at most."""

    def __init__(self, half_life_s: float = HALF_LIFE_S, window_s: float = 600.0) -> None:
        super().__init__(half_life_s)
        self._window_s = window_s
        self._window: deque[tuple[float, frozenset[str]]] = deque()

    def see(self, adapters: Iterable[str], now: float) -> None:
        """A job asks for these, by digest."""
        asked = frozenset(adapters)
        if not asked:
            return
        super().see(asked, now)
        self._window.append((now, asked))
        while self._window[0][0] < now - self._window_s:
            self._window.popleft()

    def known(self) -> tuple[str, ...]:
        """Adapters that were asked for, the latest last."""
        return tuple(self._counted)

    def counts(self, window_s: float, now: float) -> Counter[str]:
        """Uses by adapter in the latest `window_s`."""
        return Counter(digest for at_s, asked in self._window if at_s >= now - window_s for digest in asked)

    def together(self, window_s: float, now: float) -> Counter[tuple[str, str]]:
        """Jobs in the latest `window_s` by each pair of adapters that they asked for, in the order of their digests."""
        asked = (asked for at_s, asked in self._window if at_s >= now - window_s and len(asked) > 1)
        return Counter(pair for digests in asked for pair in combinations(sorted(digests), 2))


SimPlan = Callable[[SimResidency, WindowedUsage, float], Wanted]
"""A rule: what is observed, uses, and the time in seconds on the clock of the uses."""


class AdapterSelection:
    """The adapters that a place should have, most wanted first, as they are chosen for a `share` of its budget."""

    def __init__(self, place: AdapterTier, sizes: Mapping[str, int], share: float) -> None:
        self._sizes = sizes
        self._chosen: dict[str, None] = {}
        self._left_bytes = place.budget_bytes - int(place.budget_bytes * (1.0 - share))

    @property
    def chosen(self) -> tuple[str, ...]:
        """Return what was taken, in order."""
        return tuple(self._chosen)

    def __contains__(self, digest: object) -> bool:
        return digest in self._chosen

    def fits(self, digest: str) -> bool:
        """Return whether there is room for it."""
        return digest in self._sizes and self._sizes[digest] <= self._left_bytes

    def take(self, digest: str) -> bool:
        """Choose an adapter; whether it is chosen, now or before."""
        if digest in self._chosen:
            return True
        if not self.fits(digest):
            return False
        self._chosen[digest] = None
        self._left_bytes -= self._sizes[digest]
        return True


# The plan that serves.


def plan_by_use(observed: SimResidency, uses: WindowedUsage, now: float) -> Wanted:
    """As live: hosts are filled by use, and devices by jobs alone."""
    hosts = tuple(place for place in observed.places if place.kind is TierKind.HOST)
    return use_plan(ResidencySnapshot(hosts, observed.sizes), uses, now)


# ROCK's placement (Zhang et al., "ROCK", CLUSTER 2025, section 4): replicas by popularity and size.
#
# What the paper leaves open is decided here: an adapter's cluster and partition are those that its hash
# names, a partition begins at a place of its own and has as many places as its part of the uses; a place
# scores by bandwidth times free share over hops; two adapters come together where one is used with the
# other in over half of at least four uses.


RADIUS: Final = 0.25
NEIGHBOURS: Final = 6
"""Radius and neighbours of DBSCAN, `eps` and `min_samples`, as published."""
LEAST_PLACES: Final = 12
"""Fewer are one cluster: two of them could not both have a core."""
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


def clusters(places: Sequence[SimTier]) -> list[list[SimTier]]:
    """Places by cluster: DBSCAN over budget, bandwidth and speed, each scaled to [0, 1]; noise is a cluster, too.

    Totals, not what is free: with that, places of one kind would be noise. In the order of the places' names.
    """
    known = sorted(places, key=lambda place: place.name)
    if len(known) < LEAST_PLACES:
        return [known] if known else []
    from sklearn.cluster import DBSCAN  # noqa: PLC0415 - takes a second to import

    totals = list(zip(*((one.budget_bytes, one.bytes_per_s, one.speed) for one in known), strict=True))
    spans = [(min(values), (max(values) - min(values)) or 1.0) for values in totals]
    scaled = [
        [(x - low) / span for x, (low, span) in zip(row, spans, strict=True)]
        for row in zip(*totals, strict=True)
    ]
    found: dict[int, list[SimTier]] = {}
    labels = DBSCAN(eps=RADIUS, min_samples=NEIGHBOURS).fit(scaled).labels_
    for place, label in zip(known, labels.tolist(), strict=True):
        found.setdefault(label, []).append(place)
    return [found[label] for label in sorted(found)]


def replica_count(count: int, size_bytes: float, mean_bytes: float) -> int:
    """R = floor(1.5 f^0.6 sqrt(s / s̄)), as published: `count` uses in the window, bytes, and their mean."""
    return int(1.5 * math.pow(count, 0.6) * math.sqrt(size_bytes / mean_bytes))


class RockPlan:
    """ROCK's replicas of what was used; its draws depend on `seed`, the adapter and the replica alone."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def __call__(self, observed: SimResidency, uses: WindowedUsage, now: float) -> Wanted:
        """For devices and for hosts, each kind by itself, the replicas of what was used in the window."""
        wanted: dict[str, tuple[str, ...]] = {}
        for kind in TierKind:
            places = [place for place in observed.places if place.kind is kind]
            wanted |= _RockRound(self._seed, observed, places, uses, now).plan()
        return wanted


class _RockRound:
    """One round for places of one kind. What is held comes first, so that a plan that is carried out stays."""

    def __init__(
        self,
        seed: int,
        observed: SimResidency,
        places: Sequence[SimTier],
        uses: WindowedUsage,
        now: float,
    ) -> None:
        self._seed, self._observed, self._uses = seed, observed, uses
        counts = uses.counts(WINDOW_S, now)
        self._counts = {digest: n for digest, n in counts.items() if digest in observed.sizes}
        self._together = uses.together(WINDOW_S, now)
        self._hot = sorted(self._counts, key=lambda digest: (-self._counts[digest], digest))
        self._places = {place.name: place for place in sorted(places, key=lambda place: place.name)}
        self._fillings = {
            name: AdapterSelection(place, observed.sizes, FULL) for name, place in self._places.items()
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


# The baseline `proactive` of ROCK's evaluation: what was popular lately is loaded wherever it fits.


PROACTIVE_PERIOD_S: Final = 60.0
"""How often it plans."""
PROACTIVE_HALF_LIFE_S: Final = 600.0
"""Half-life of the uses that it is given."""
SHARE: Final = 0.5
"""Share of each tier that it fills."""
LEAST_USES: Final = 0.05
"""Below it, an adapter is not popular: one use, 43 minutes ago."""


def proactive_plan(observed: SimResidency, uses: WindowedUsage, now: float) -> Wanted:
    """The most popular adapters, as many as fit into half of each place."""
    counted = {digest: n for digest in observed.sizes if (n := uses.lately(digest, now)) >= LEAST_USES}
    popular = sorted(counted, key=lambda digest: (-counted[digest], digest))
    wanted = {}
    for place in observed.places:
        filling = AdapterSelection(place, observed.sizes, SHARE)
        for digest in popular:
            filling.take(digest)
        wanted[place.name] = filling.chosen
    return wanted


class AdapterPlan(StrEnum):
    """The name of a plan in simulations."""

    OFF = "off"
    """None: adapters come as jobs need them."""
    ROCK = "rock"
    USE = "use"
    PROACTIVE = "proactive"


class ResidencyPlanner(NamedTuple):
    """A rule and its times."""

    make: Callable[[int], SimPlan]
    """The plan of a seed."""
    period_s: float
    half_life_s: float = HALF_LIFE_S
    """Half-life of the uses that the plan is given."""


PLANNERS: Final[Mapping[str, ResidencyPlanner]] = {
    AdapterPlan.ROCK: ResidencyPlanner(RockPlan, ROCK_PERIOD_S),
    AdapterPlan.USE: ResidencyPlanner(lambda _: plan_by_use, USE_PERIOD_S),
    AdapterPlan.PROACTIVE: ResidencyPlanner(
        lambda _: proactive_plan, PROACTIVE_PERIOD_S, PROACTIVE_HALF_LIFE_S
    ),
}
"""All but `off`."""
