"""Templates that a simulated worker keeps, and the link over which it reads them. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Final

from giornata.residency.ledger import EvictionLedger
from giornata.wire.workers import LoadSample, TemplateCounters, Tier
from giornata_lab.simulation.machines import TemplateStorage
from giornata_lab.simulation.processors import SimClock

TOLD: Final = 256
"""Templates or adapters of a tier that telemetry tells, as :class:`giornata.wire.workers.WorkerState` says."""


@dataclass(frozen=True)
class TemplateSetting:
    """How all workers keep templates."""

    size_bytes: float = 0.0
    """Size of one template; 0: all of them fit anywhere."""
    kv_bytes: float = 0.0
    """Keys and values that a row takes from memory a step; 0: loads are neglected."""
    registered: frozenset[str] = frozenset()
    """Templates that are recorded at their first edit on a worker; others at their second."""
    preloaded: tuple[str, ...] = ()
    """Templates in memory of every worker from the start, the most popular first, as far as there is room."""


class FifoLink:
    """First come, first served: a load takes a latency and its bytes over the bandwidth. Times are in seconds.

    Args:
        bytes_per_s: bandwidth.
        latency_s: what every load takes beside it.
    """

    def __init__(self, bytes_per_s: float, latency_s: float = 0.0) -> None:
        self._bytes_per_s, self._latency_s = bytes_per_s, latency_s
        self._free_s = 0.0
        """When the last load that was begun ends."""

    def takes_s(self, size_bytes: float) -> float:
        """Time of one load on an idle link."""
        return self._latency_s + size_bytes / self._bytes_per_s

    def wait_s(self, now: float) -> float:
        """Time until a new load would begin."""
        return max(0.0, self._free_s - now)

    def load(self, size_bytes: float, now: float) -> float:
        """Queue a load that may begin `now`; when it ends."""
        self._free_s = max(now, self._free_s) + self.takes_s(size_bytes)
        return self._free_s


class SimTemplates:
    """Memory and disk of one worker, least recently used out first; reads from disk come one after the other."""

    def __init__(
        self,
        setting: TemplateSetting,
        storage: TemplateStorage,
        clock: SimClock,
        told: Callable[[LoadSample], None],
    ) -> None:
        self._clock, self._told = clock, told
        self._size_bytes = max(1, round(setting.size_bytes))
        self._tiers = {
            tier: EvictionLedger(round(min(bytes_, 1e18)))
            for tier, bytes_ in ((Tier.MEMORY, storage.memory_bytes), (Tier.DISK, storage.disk_bytes))
        }
        self._link = FifoLink(storage.disk_bytes_per_s)
        self._coming: dict[str, float] = {}
        """When a template is in memory, of those that are being read."""
        most = self._tiers[Tier.MEMORY].budget_bytes // self._size_bytes
        for template in reversed(setting.preloaded[:most]):
            self._tiers[Tier.MEMORY].add(template, self._size_bytes)

    def find(self, template: str, now: float) -> tuple[Tier | None, float]:
        """The fastest tier that has `template`, which counts as used, and when it is in memory."""
        on_disk = self._tiers[Tier.DISK].use(template)
        if self._tiers[Tier.MEMORY].use(template):
            return Tier.MEMORY, now
        if not on_disk:
            return None, now
        if template not in self._coming:
            self._read(template, now)
        return Tier.DISK, self._coming[template]

    def put(self, template: str) -> None:
        """Keep a recorded template, in memory and on disk."""
        for tier in self._tiers.values():
            tier.add(template, self._size_bytes)

    def resident(self) -> dict[Tier, tuple[str, ...]]:
        """Templates by tier, lately used first, as telemetry tells them."""
        return {tier: tuple(islice(reversed(list(held)), TOLD)) for tier, held in self._tiers.items()}

    def counted(self) -> TemplateCounters:
        """Bytes by tier, as telemetry tells them."""
        memory, disk = self._tiers[Tier.MEMORY], self._tiers[Tier.DISK]
        return TemplateCounters(memory_bytes=memory.size_bytes, disk_bytes=disk.size_bytes)

    def _read(self, template: str, now: float) -> None:
        took_s = self._link.takes_s(self._size_bytes)
        self._coming[template] = self._link.load(self._size_bytes, now)

        def arrived(_now: float) -> None:
            del self._coming[template]
            self._tiers[Tier.MEMORY].add(template, self._size_bytes)
            sample = LoadSample(tier=Tier.DISK, size_bytes=self._size_bytes, load_ms=took_s * 1e3)
            self._told(sample)

        self._clock.at(self._coming[template], arrived)
