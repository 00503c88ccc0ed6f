"""Host tiers as a listener knows them, uses of adapters, homes of templates and adapters, the default plan. Pure."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
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
    """Feed it every job's adapters once. Times are seconds on one clock and never go back."""

    def __init__(self, half_life_s: float = HALF_LIFE_S) -> None:
        self._half_life_s = half_life_s
        self._counted: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """What an adapter counted when it was asked for last, and when that was; the latest last."""

    def see(self, adapters: Iterable[str], now: float) -> None:
        """A job asks for these, by digest."""
        for digest in sorted(set(adapters)):
            self._counted[digest] = 1.0 + self.lately(digest, now), now
            self._counted.move_to_end(digest)
            if len(self._counted) > REMEMBERED:
                self._counted.popitem(last=False)

    def copy(self) -> AdapterUsage:
        """The uses as they are now, for another thread."""
        made = AdapterUsage(self._half_life_s)
        made._counted = self._counted.copy()
        return made

    def lately(self, digest: str, now: float) -> float:
        """Uses of an adapter; each counts half after the half-life."""
        counted, at_s = self._counted.get(digest, (0.0, now))
        return float(counted * 0.5 ** ((now - at_s) / self._half_life_s))


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


@dataclass(frozen=True)
class AdapterTier:
    """A host tier, which a plan may fill."""

    name: str
    budget_bytes: int
    held: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each adapter that it has, by digest."""


@dataclass(frozen=True)
class ResidencySnapshot:
    """The planner's knowledge of the host tiers and the catalogue."""

    places: tuple[AdapterTier, ...]
    sizes: Mapping[str, int]
    """Bytes of every adapter of the catalogue, by digest."""
    pinned: frozenset[str] = frozenset()
    """Adapters that the catalogue pins: every host keeps them."""
    registered: frozenset[str] = frozenset()
    """Adapters that were registered since the last plan."""


Wanted = Mapping[str, tuple[str, ...]]
"""By name of the place: digests of the adapters that it should have, the most wanted first. Together they fit into its
budget."""


# The plan.
#
# An adapter's uses count in full at its rendezvous home, half at its second place, a third at the next one:
# so the hosts together hold more of the catalogue than each alone, and what is used most is on several.
# What a host has counts more than what it has not, by `STICKY`. So a plan that was carried out is the next
# plan too, and two adapters that are used about as much do not take turns.


USE_PERIOD_S: Final = 15.0
"""How often it plans."""
STICKY: Final = 1.25
"""So many times as often an adapter has to be used as one that goes for it."""
LEAST_USES: Final = 0.05
"""Below it, an adapter is not wanted: one use, two hours ago. A tier keeps it until it needs the room."""
REGISTERED_USES: Final = 1.0
"""What the registration of an adapter counts at its home."""


def use_plan(observed: ResidencySnapshot, uses: AdapterUsage, now: float) -> Wanted:
    """By host, the adapters that are used most there; devices are left to loads ahead of jobs."""
    hosts = {place.name: place for place in observed.places}
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

    It begins with pinned ones, and what it has, the most used first, as far as they fit. Every change keeps more, or
    what is used more, so it ends. What is used most counts most for each of its bytes: a load takes time by its bytes.
    """
    sizes = observed.sizes
    pins, left_bytes = list[str](), place.budget_bytes
    for digest in sorted(observed.pinned & sizes.keys()):
        if sizes[digest] <= left_bytes:
            pins.append(digest)
            left_bytes -= sizes[digest]
    offers = [
        (used, digest)
        for digest, used in shares.items()
        if digest not in pins and sizes[digest] <= place.budget_bytes
    ]
    offers.sort(key=lambda offer: (-offer[0], offer[1]))
    kept = list[tuple[float, str]]()  # uses and digest, the least first
    for offer in offers:
        if offer[1] in place.held and sizes[offer[1]] <= left_bytes:
            insort(kept, offer)
            left_bytes -= sizes[offer[1]]
    came = True
    while came:
        came = False
        chosen = set(kept)
        for offer in (offer for offer in offers if offer not in chosen):
            gone = _displaced(offer, sizes[offer[1]] - left_bytes, kept, sizes)
            if gone is not None:
                for one in gone:
                    kept.remove(one)
                insort(kept, offer)
                left_bytes += sum(sizes[digest] for _, digest in gone) - sizes[offer[1]]
                came = True
    return (*pins, *(digest for _, digest in sorted(kept, key=lambda one: (-one[0], one[1]))))


def _displaced(
    offer: tuple[float, str], missing_bytes: int, kept: list[tuple[float, str]], sizes: Mapping[str, int]
) -> list[tuple[float, str]] | None:
    """What of `kept` goes for `offer`, the least used first; None where that is used too much to go."""
    gone, most = list[tuple[float, str]](), offer[0] * sizes[offer[1]] / STICKY
    for used, digest in kept if missing_bytes > 0 else ():
        if used * STICKY >= offer[0]:  # as are all after it
            return None
        gone.append((used, digest))
        most -= used * sizes[digest]
        missing_bytes -= sizes[digest]
        if missing_bytes <= 0:
            break
    return gone if missing_bytes <= 0 and most >= 0 else None
