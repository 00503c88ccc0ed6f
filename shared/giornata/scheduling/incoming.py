"""LoRAs on their way to one worker: those of the jobs and prefetches that this router has sent there. Pure.

A worker loads a few LoRAs at a time and the others in their order, so a new load begins when a lane is free. Telemetry
tells what has arrived; until then a load is expected to take what loads of its size take.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from giornata.scheduling.adapters import Arrivals, NeededLora
from giornata.wire.workers import Tier

LANES: Final = 2
"""Loads that a worker runs at a time, as far as the router knows: the default of `GIORNATA_LORA_LOADS`."""
OVERDUE: Final = 4.0
TOLD_S: Final = 3.0
"""A load that takes so many times what is expected, and so much longer, has failed, or the LoRA has been evicted again:
telemetry would have told of it."""


class _Load(NamedTuple):
    began_s: float
    ends_s: float


class Incoming:
    """The loads of one worker. Times are seconds on the clock by which it is fed."""

    def __init__(self) -> None:
        self._loads: dict[str, _Load] = {}
        """By digest, in the order in which they were asked for."""
        self._free_s = [0.0] * LANES
        """When each lane is."""

    def copy(self) -> Incoming:
        """The same loads, which then go their own way."""
        made = Incoming()
        made._loads, made._free_s = dict(self._loads), list(self._free_s)
        return made

    def bring(
        self, loras: Iterable[NeededLora], held: Mapping[str, Tier], arrivals: Arrivals, now: float
    ) -> None:
        """The worker is told to load `loras`; it loads those that are neither in its memory nor on their way."""
        for lora in loras:
            tier = held.get(lora.digest)
            if lora.digest not in self._loads and tier not in {Tier.MEMORY, Tier.DEVICE}:
                self._add(lora.digest, arrivals.memory_ms(lora.size_bytes, tier) / 1e3, now)

    def settle(self, held: Mapping[str, Tier], now: float) -> None:
        """Take in what telemetry tells: what is in memory has arrived, and later loads begin sooner than expected."""
        if not self._loads:
            return
        before, self._loads, self._free_s = self._loads, {}, [now] * LANES
        for digest, load in before.items():
            takes_s = load.ends_s - load.began_s
            if (
                held.get(digest) in {Tier.MEMORY, Tier.DEVICE}
                or now - load.began_s > OVERDUE * takes_s + TOLD_S
            ):
                continue
            if load.began_s > now:
                self._add(digest, takes_s, now)
                continue
            self._loads[digest] = load
            lane = self._first_free()
            self._free_s[lane] = max(now, load.ends_s)

    def left_ms(self, digest: str, now: float) -> float | None:
        """Time until a LoRA is in memory; None where it is not on its way."""
        load = self._loads.get(digest)
        return None if load is None else max(0.0, load.ends_s - now) * 1e3

    def queue_ms(self, now: float) -> float:
        """Time until a new load begins."""
        return max(0.0, min(self._free_s) - now) * 1e3

    def _add(self, digest: str, takes_s: float, now: float) -> None:
        lane = self._first_free()
        began_s = max(now, self._free_s[lane])
        self._free_s[lane] = began_s + takes_s
        self._loads[digest] = _Load(began_s, began_s + takes_s)

    def _first_free(self) -> int:
        return min(range(LANES), key=self._free_s.__getitem__)
