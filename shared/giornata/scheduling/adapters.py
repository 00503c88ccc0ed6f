"""Adapters that jobs ask for: where workers have them, and how long the others take to arrive. Pure.

A LoRA comes in hops: from the LoRA store to memory, from the disk to memory, from memory to the device. A job that
waits for its LoRAs begins when the last hop has ended and a place is free, whichever is later (Katz, ATC '25, section
6, begins earlier, and so does a job that does not wait).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from giornata.scheduling.unit_time import LinearTimeModel
from giornata.wire.workers import AdapterLoad, Tier

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
    """How long LoRAs take to become usable on workers of one kind."""

    def __init__(self) -> None:
        self._hops = {source: LinearTimeModel(ms) for source, ms in ASSUMED.items()}

    def observe(self, load: AdapterLoad) -> None:
        """Take in one hop of one LoRA."""
        if load.source in self._hops:
            self._hops[load.source].observe(load.size_bytes, load.load_ms)

    def ms(self, size_bytes: int, tier: Tier | None) -> float:
        """Time until a LoRA of this size is on the device, from the fastest tier that has it; None for the store."""
        if tier is Tier.DEVICE:
            return 0.0
        return self.memory_ms(size_bytes, tier) + self._hops[Tier.MEMORY].ms(size_bytes)

    def memory_ms(self, size_bytes: int, tier: Tier | None) -> float:
        """Time until it is in memory."""
        return 0.0 if tier in {Tier.MEMORY, Tier.DEVICE} else self._hops[tier].ms(size_bytes)

    def repeated_ms(self, lora: NeededLora) -> float:
        """Time that a worker saves which finds a LoRA in its memory and need not ask the LoRA store."""
        return self.ms(lora.size_bytes, None) - self.ms(lora.size_bytes, Tier.MEMORY)


SPEED: Final[Mapping[Tier | None, int]] = {None: 0, Tier.DISK: 1, Tier.MEMORY: 2, Tier.DEVICE: 3}


def faster(one: Tier | None, other: Tier | None) -> Tier | None:
    """The tier that is nearer to the device."""
    return max(one, other, key=SPEED.__getitem__)


def by_tier(resident: Mapping[Tier, Iterable[str]]) -> dict[str, Tier]:
    """The fastest tier of everything that telemetry lists by tier; a tier that is not known here is left out."""
    tiers = (tier for tier in (Tier.DISK, Tier.MEMORY, Tier.DEVICE) if tier in resident)
    return {key: tier for tier in tiers for key in resident[tier]}
