"""What a plan is made from, and what it says. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from giornata.residency.uses import AdapterUsage


class TierKind(StrEnum):
    """What adapters can be on."""

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
    """What the planner knows of the cluster and the catalogue."""

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
