"""Host tiers as a listener knows them, uses of adapters, homes of templates and adapters, the default plan. Pure."""

from __future__ import annotations

from bisect import insort
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from itertools import combinations
from typing import Final

from giornata.wire.loras import HostTier, TierChange, TierSnapshot

KEPT: Final = 4096
"""Changes of one tier that may wait for earlier ones; more are let go, and a snapshot is needed."""


@dataclass
class _HostTierState:
    """One tier of one process."""

    epoch: int
    instance: str
    told: HostTier | None = None
    number: int | None = None
    """Number of the latest change in `held`; None before the first snapshot, unless all changes came."""
    latest: int = 0
    """The latest number that was told."""
    held: dict[str, int] = field(default_factory=dict)
    early: dict[int, TierChange] = field(default_factory=dict)

    def settle(self) -> None:
        """Apply the changes that have come in turn."""
        if self.number is None:
            return
        while change := self.early.pop(self.number + 1, None):
            self.number += 1
            if change.size_bytes is None:
                self.held.pop(change.sha256, None)
            else:
                self.held[change.sha256] = change.size_bytes

    @property
    def complete(self) -> bool:
        return self.number is not None and self.number >= self.latest


class HostTiers:
    """The host tiers of a cluster, by name, as a listener knows them from snapshots and numbered changes.

    Telemetry may be lost, doubled and late. Changes are applied in the order of their numbers; a change that comes
    early waits. Where one is missing, the tier is named by :meth:`gaps`, and a snapshot makes up for it.
    """

    def __init__(self) -> None:
        self._known: dict[str, _HostTierState] = {}

    def observe(self, instance: str, told: HostTier) -> None:
        """Take in telemetry of a store. What an earlier process of the tier says late is passed over."""
        known = self._of(told.name, told.epoch, instance)
        if known is None:
            return
        if known.told is None or told.number >= known.told.number:
            known.told = told
        known.latest = max(known.latest, told.number)
        if known.number is None and known.latest == len(told.changes):  # all there ever were
            known.number = 0
        known.early |= {
            change.number: change for change in told.changes if change.number > (known.number or 0)
        }
        while len(known.early) > KEPT:
            del known.early[next(iter(known.early))]
        known.settle()

    def snapshot(self, instance: str, snapshot: TierSnapshot) -> None:
        """Take in a snapshot; one that is older than what is known changes nothing."""
        known = self._of(snapshot.name, snapshot.epoch, instance)
        if known is None:
            return
        known.latest = max(known.latest, snapshot.number)
        if known.number is not None and snapshot.number <= known.number:
            return
        known.number, known.held = snapshot.number, snapshot.held
        known.early = {number: change for number, change in known.early.items() if number > snapshot.number}
        known.settle()

    def forget(self, instance: str) -> None:
        """The store has left, or fell silent: its tier is filled by nobody."""
        for name in [name for name, known in self._known.items() if known.instance == instance]:
            del self._known[name]

    def keep(self, instances: Collection[str]) -> None:
        """Forget the tiers of all other stores."""
        self._known = {name: known for name, known in self._known.items() if known.instance in instances}

    def gaps(self) -> dict[str, str]:
        """Instances to ask for a snapshot, by the name of their tier."""
        return {name: known.instance for name, known in self._known.items() if not known.complete}

    def names(self) -> tuple[str, ...]:
        """All tiers."""
        return tuple(self._known)

    def told(self, name: str) -> HostTier | None:
        """The latest telemetry of a tier."""
        known = self._known.get(name)
        return known.told if known else None

    def held(self, name: str) -> Mapping[str, int]:
        """Bytes of each file of a tier, by digest, as far as it is known."""
        known = self._known.get(name)
        return known.held if known else {}

    def has(self, name: str | None, digest: str) -> bool:
        """Return whether a tier has a file."""
        known = None if name is None else self._known.get(name)
        return known is not None and digest in known.held

    def _of(self, name: str, epoch: int, instance: str) -> _HostTierState | None:
        known = self._known.get(name)
        if known is not None and known.epoch > epoch:
            return None
        if known is None or known.epoch < epoch:
            known = self._known[name] = _HostTierState(epoch, instance)
        return known


# Uses.

HALF_LIFE_S: Final = 1800.0
"""Time after which a use counts half."""
REMEMBERED: Final = 1 << 16
"""Adapters of which uses are known, those that were asked for last."""


class AdapterUsage:
    """Feed it every job's adapters once. Times are seconds on one clock and never go back.

    :meth:`counts` and :meth:`together` look back `window_s` at most.
    """

    def __init__(self, half_life_s: float = HALF_LIFE_S, window_s: float = 600.0) -> None:
        self._half_life_s, self._window_s = half_life_s, window_s
        self._counted: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """What an adapter counted when it was asked for last, and when that was; the latest last."""
        self._window: deque[tuple[float, frozenset[str]]] = deque()

    def see(self, adapters: Iterable[str], now: float) -> None:
        """A job asks for these, by digest."""
        asked = frozenset(adapters)
        if not asked:
            return
        for digest in sorted(asked):
            self._counted[digest] = 1.0 + self.lately(digest, now), now
            self._counted.move_to_end(digest)
            if len(self._counted) > REMEMBERED:
                self._counted.popitem(last=False)
        self._window.append((now, asked))
        while self._window[0][0] < now - self._window_s:
            self._window.popleft()

    def copy(self) -> AdapterUsage:
        """The uses as they are now, for another thread."""
        made = AdapterUsage(self._half_life_s, self._window_s)
        made._counted, made._window = self._counted.copy(), self._window.copy()
        return made

    def lately(self, digest: str, now: float) -> float:
        """Uses of an adapter; each counts half after the half-life."""
        counted, at_s = self._counted.get(digest, (0.0, now))
        return float(counted * 0.5 ** ((now - at_s) / self._half_life_s))

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


# Homes of templates and adapters: places in an order that every process finds by itself.
#
# Rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998): a
# place that comes or goes moves the homes of its own adapters alone.


def rendezvous_weight(*parts: str) -> int:
    """A number of 64 bits that looks drawn, and is the same in every process."""
    digest = blake2b("\0".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def home_of(places: Iterable[str], name: str) -> str | None:
    """The place with the highest number for `name`; None where there is no place."""
    return max(places, key=lambda place: rendezvous_weight(name, place), default=None)


def rank_homes(name: str, places: Iterable[str]) -> list[str]:
    """The places of `name`, its home first."""
    return sorted(places, key=lambda place: (-rendezvous_weight(name, place), place))


class TierKind(StrEnum):
    """The tiers that adapters can be in."""

    HOST = "host"
    """The memory or fast disk of a machine, filled by its LoRA store."""
    DEVICE = "device"
    """The device of one worker, filled from its host."""


@dataclass(frozen=True)
class AdapterTier:
    """A tier of limited size that a plan may fill."""

    name: str
    """The host's name, or the worker's instance."""
    kind: TierKind
    host: str
    budget_bytes: int
    held: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each adapter that it has, by digest."""
    bytes_per_s: float = 1e9
    """Bandwidth of the link that fills it."""
    latency_s: float = 0.0
    """What each load takes beside its bytes."""
    speed: float = 1.0
    """How fast its workers compute, to compare places."""

    @property
    def used_bytes(self) -> int:
        """Bytes of what it has."""
        return sum(self.held.values())

    def load_s(self, size_bytes: int) -> float:
        """Time of one load."""
        return self.latency_s + size_bytes / self.bytes_per_s


@dataclass(frozen=True)
class ResidencySnapshot:
    """The planner's knowledge of the cluster and the catalogue."""

    places: tuple[AdapterTier, ...]
    sizes: Mapping[str, int]
    """Bytes of every adapter of the catalogue, by digest."""
    pinned: frozenset[str] = frozenset()
    """Adapters that the catalogue pins: every host keeps them."""
    registered: frozenset[str] = frozenset()
    """Adapters that were registered since the last plan."""


Wanted = Mapping[str, tuple[str, ...]]
"""By name of the place: digests of the adapters that it should have, the most wanted first. Together they fit into its
budget. A place that is left out keeps what it has."""

Plan = Callable[[ResidencySnapshot, AdapterUsage, float], Wanted]
"""A rule: what is observed, uses, and the time in seconds on the clock of the uses."""


class AdapterSelection:
    """The adapters that a place should have, most wanted first, as they are chosen.

    What is `pinned` comes first, as far as it fits; the others may fill a `share` of the budget.
    """

    def __init__(
        self, place: AdapterTier, sizes: Mapping[str, int], pinned: Iterable[str] = (), share: float = 1.0
    ) -> None:
        self.place, self._sizes = place, sizes
        self._chosen: dict[str, None] = {}
        self._left_bytes = place.budget_bytes
        for digest in sorted(pinned):
            self.take(digest)
        self._left_bytes -= int(place.budget_bytes * (1.0 - share))

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


def pins_of(place: AdapterTier, observed: ResidencySnapshot) -> frozenset[str]:
    """Adapters that the catalogue pins to this place: hosts keep them, devices take them as jobs need them."""
    return observed.pinned if place.kind is TierKind.HOST else frozenset()


# The default plan.
#
# An adapter's uses count in full at its rendezvous home, half at its second place, a third at the next one:
# so the hosts together hold more of the catalogue than each alone, and what is used most is on several.
# What a host has counts more than what it has not, by `STICKY`, and nothing goes for an adapter that is
# used less. So a plan that was carried out is the next plan too, and two adapters of about the same worth
# do not take turns.


USE_PERIOD_S: Final = 15.0
"""How often it plans."""
STICKY: Final = 1.25
"""So many times as often an adapter has to be used as one that goes for it."""
LEAST_USES: Final = 0.05
"""Below it, an adapter is not wanted: one use, two hours ago. A tier keeps it until it needs the room."""
REGISTERED_USES: Final = 1.0
"""What the registration of an adapter counts at its home."""


def use_plan(observed: ResidencySnapshot, uses: AdapterUsage, now: float) -> Wanted:
    """By host, the adapters that are worth most there; devices are left to loads ahead of jobs."""
    hosts = {place.name: place for place in observed.places if place.kind is TierKind.HOST}
    counted = {digest: n for digest in observed.sizes if (n := uses.lately(digest, now)) >= LEAST_USES}
    shares: dict[str, dict[str, float]] = {name: {} for name in hosts}
    for digest in counted.keys() | (observed.registered & observed.sizes.keys()):
        for rank, name in enumerate(rank_homes(digest, hosts)):
            expected = counted.get(digest, 0.0) / (1 + rank)
            if rank == 0 and digest in observed.registered:
                expected = max(expected, REGISTERED_USES)
            if expected >= LEAST_USES:
                shares[name][digest] = expected
    return {name: _wanted(place, shares[name], observed) for name, place in hosts.items()}


def _wanted(place: AdapterTier, shares: Mapping[str, float], observed: ResidencySnapshot) -> tuple[str, ...]:
    """Digests for a host, of adapters whose expected uses there are `shares`.

    It begins with what it has, the worth most first, as far as it fits. Every change keeps more, or what is used more,
    so it ends. The worth of an adapter is its uses times the time of another load over its bytes.
    """
    sizes = observed.sizes
    pins = AdapterSelection(place, sizes, pins_of(place, observed)).chosen
    offers = [
        (uses * place.load_s(sizes[digest]) / max(1, sizes[digest]), digest)
        for digest, uses in shares.items()
        if digest not in pins and sizes[digest] <= place.budget_bytes
    ]
    offers.sort(key=lambda offer: (-offer[0], offer[1]))
    left_bytes = place.budget_bytes - sum(sizes[digest] for digest in pins)
    kept = list[tuple[float, str]]()  # worth and digest, the least first
    for offer in offers:
        if offer[1] in place.held and sizes[offer[1]] <= left_bytes:
            insort(kept, offer)
            left_bytes -= sizes[offer[1]]
    came = True
    while came:
        came = False
        chosen = set(kept)
        for offer in (offer for offer in offers if offer not in chosen):
            gone = _displaced(offer, sizes[offer[1]] - left_bytes, kept, sizes, shares)
            if gone is not None:
                for one in gone:
                    kept.remove(one)
                insort(kept, offer)
                left_bytes += sum(sizes[digest] for _, digest in gone) - sizes[offer[1]]
                came = True
    return (*pins, *(digest for _, digest in sorted(kept, key=lambda one: (-one[0], one[1]))))


def _displaced(
    offer: tuple[float, str],
    missing_bytes: int,
    kept: list[tuple[float, str]],
    sizes: Mapping[str, int],
    uses: Mapping[str, float],
) -> list[tuple[float, str]] | None:
    """What of `kept` goes for `offer`, worth least first; None where it is worth too much, or used too much, to go."""
    gone, most_s = list[tuple[float, str]](), offer[0] * sizes[offer[1]] / STICKY
    for worth, digest in kept if missing_bytes > 0 else ():
        if worth * missing_bytes > most_s:  # as are all after it
            return None
        if uses[digest] * STICKY < uses[offer[1]]:
            gone.append((worth, digest))
            most_s -= worth * sizes[digest]
            missing_bytes -= sizes[digest]
            if missing_bytes <= 0:
                break
    return gone if missing_bytes <= 0 and most_s >= 0 else None
