"""Adapters that jobs ask for: where workers have them, which are on their way, and how long the others take. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

from giornata.wire.adapters import ControlCard
from giornata.wire.controlnets import ControlBase
from giornata.wire.workers import AdapterLoad, ServiceState, Tier

KEPT: Final = 0.9
"""Weight of all earlier observations at each new one."""


class UnitTime:
    """Time that grows in proportion to an amount: total time over total amount, both with forgetting.

    It begins as if `amount` had taken `ms`: small ones give way to the first observation.
    """

    def __init__(self, amount: float = 0.0, ms: float = 0.0) -> None:
        self._amount, self._ms = amount, ms

    def observe(self, amount: float, ms: float) -> None:
        """Take in that `amount` took `ms`."""
        self._amount = KEPT * self._amount + amount
        self._ms = KEPT * self._ms + ms

    def ms(self, amount: float) -> float:
        """Time that `amount` takes; 0 before the first observation."""
        return amount * self._ms / self._amount if self._amount else 0.0


# A LoRA comes in hops: from the LoRA store to memory, from the disk to memory, from memory to the device. A
# job that waits for its LoRAs begins when the last hop has ended and a place is free, whichever is later
# (Katz, ATC '25, section 6, begins earlier, and so does a job that does not wait).


ASSUMED: Final[Mapping[Tier | None, float]] = {None: 2e-6, Tier.DISK: 5e-7, Tier.MEMORY: 1e-7}
"""Milliseconds a byte of each hop before one was told: 0.5, 2 and 10 GB a second."""


class NeededLora(NamedTuple):
    """A LoRA of a job."""

    digest: str
    """sha-256 of its canonical file."""
    size_bytes: int


class NeededControl(NamedTuple):
    """A ControlNet of a job."""

    digest: str
    """Digest of its checkpoint."""
    share: float
    """Share of the job's steps in which it acts."""


class LoraLoadTimes:
    """The times that LoRAs take to become usable on workers of one kind."""

    def __init__(self) -> None:
        self._hops = {source: UnitTime(1.0, ms) for source, ms in ASSUMED.items()}

    def observe(self, load: AdapterLoad) -> None:
        """Take in one hop of one LoRA."""
        if load.source in self._hops:
            self._hops[load.source].observe(load.size_bytes, load.load_ms)

    def ms(self, size_bytes: int, tier: Tier | None) -> float:
        """Time until a LoRA of this size is on the device, from the fastest tier that has it; None for the store."""
        if tier is Tier.DEVICE:
            return 0.0
        to_memory_ms = 0.0 if tier is Tier.MEMORY else self._hops[tier].ms(size_bytes)
        return to_memory_ms + self._hops[Tier.MEMORY].ms(size_bytes)

    def repeated_ms(self, lora: NeededLora) -> float:
        """Time that a worker saves which finds a LoRA in its memory and need not ask the LoRA store."""
        return self.ms(lora.size_bytes, None) - self.ms(lora.size_bytes, Tier.MEMORY)


def fastest_tiers(resident: Mapping[Tier, Iterable[str]]) -> dict[str, Tier]:
    """The fastest tier of everything that telemetry lists by tier; a tier that is not known here is left out."""
    tiers = (tier for tier in (Tier.DISK, Tier.MEMORY, Tier.DEVICE) if tier in resident)
    return {key: tier for tier in tiers for key in resident[tier]}


# A worker loads a few jobs' adapters at a time, each job's one after the other, and the others in their
# order: a new load begins when a lane is free, and takes every hop to the device. Telemetry tells what has
# arrived; until then a load is expected to take what loads of its size take.


LANES: Final = 2
"""Loads that a worker runs at a time by default; each tells how many it runs."""
OVERDUE: Final = 4.0
TOLD_S: Final = 3.0
"""A load that takes so many times what is expected, and so much longer, has failed, or the adapter has been evicted
again: telemetry would have told of it."""
STAYING: Final = 2.0
"""The same of one that is in memory by then."""


class _ExpectedLoad(NamedTuple):
    began_s: float
    ends_s: float


class PendingAdapterLoads:
    """The loads of one worker, so many `lanes` at a time. Times are seconds on the clock by which it is fed."""

    def __init__(self, lanes: int = LANES) -> None:
        self._loads: dict[str, _ExpectedLoad] = {}
        """By digest, in the order in which they were asked for."""
        self._free_s = [0.0] * lanes
        """When each lane is."""

    def lacks(self, digests: Collection[str]) -> bool:
        """Return whether none of these is on its way."""
        return not self._loads or self._loads.keys().isdisjoint(digests)

    def copy(self) -> PendingAdapterLoads:
        """The same loads, which then go their own way."""
        made = PendingAdapterLoads(len(self._free_s))
        made._loads, made._free_s = dict(self._loads), list(self._free_s)
        return made

    def bring(
        self, adapters: Iterable[NeededLora], held: Mapping[str, Tier], arrivals: LoraLoadTimes, now: float
    ) -> None:
        """The worker is told to load a job's `adapters`: those that are neither on its device nor on their way."""
        lane = self._first_free()
        for adapter in adapters:
            tier = held.get(adapter.digest)
            if adapter.digest not in self._loads and tier is not Tier.DEVICE:
                self._add(adapter.digest, arrivals.ms(adapter.size_bytes, tier) / 1e3, lane, now)

    def settle(self, held: Mapping[str, Tier], now: float) -> None:
        """Take in what telemetry tells: what is on the device has arrived, and later loads begin sooner than expected.

        What is still in memory when it should have been on the device for as long as the load takes stays there: the
        device has no room.
        """
        if not self._loads:
            return
        before, self._loads, self._free_s = self._loads, {}, [now] * len(self._free_s)
        for digest, load in before.items():
            takes_s, tier = load.ends_s - load.began_s, held.get(digest)
            late = OVERDUE * takes_s + TOLD_S if tier is not Tier.MEMORY else STAYING * takes_s
            if tier is Tier.DEVICE or now - load.began_s > late:
                continue
            if load.began_s > now:
                self._add(digest, takes_s, self._first_free(), now)
                continue
            self._loads[digest] = load
            lane = self._first_free()
            self._free_s[lane] = max(now, load.ends_s)

    def left_ms(self, digest: str, now: float) -> float | None:
        """Time until an adapter is on the device; None where it is not on its way."""
        load = self._loads.get(digest)
        return None if load is None else max(0.0, load.ends_s - now) * 1e3

    def queue_ms(self, now: float) -> float:
        """Time until a new load begins."""
        if not self._loads:
            return 0.0
        return max(0.0, min(self._free_s) - now) * 1e3

    def _add(self, digest: str, takes_s: float, lane: int, now: float) -> None:
        began_s = max(now, self._free_s[lane])
        self._free_s[lane] = began_s + takes_s
        self._loads[digest] = _ExpectedLoad(began_s, began_s + takes_s)

    def _first_free(self) -> int:
        return min(range(len(self._free_s)), key=self._free_s.__getitem__)


def is_control_of(card: ControlCard, base: ControlBase) -> bool:
    """Return whether a ControlNet is one of such a network, as far as its card tells: its weights tell the rest."""
    return card.kind is base.kind and card.text_channels == base.text_channels


class ControlOffers:
    """The ControlNets of every instance of the service that takes rows."""

    def __init__(self) -> None:
        self._offers: dict[str, frozenset[str]] = {}

    def observe(self, state: ServiceState) -> None:
        """Take in an instance's telemetry."""
        if state.ready and not state.draining:
            self._offers[state.instance] = frozenset(card.digest for card in state.controlnets)
        else:
            self.forget(state.instance)

    def forget(self, instance: str) -> None:
        """It is gone, if it was one."""
        self._offers.pop(instance, None)

    def has(self, digests: Collection[str]) -> bool:
        """Return whether one instance has them all: a row's ControlNets are summed where they are computed."""
        return any(offer.issuperset(digests) for offer in self._offers.values())
