"""Adapters on their way to one worker's device: those of the jobs and prefetches that this router has sent there. Pure.

A worker loads a few jobs' adapters at a time, each job's one after the other, and the others in their order: a new load
begins when a lane is free, and takes every hop to the device. Telemetry tells what has arrived; until then a load is
expected to take what loads of its size take.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

from giornata.scheduling.adapters import LoraLoadTimes, NeededLora
from giornata.wire.workers import Tier

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
        """Whether none of these is on its way."""
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
