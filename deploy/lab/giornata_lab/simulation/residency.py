"""Adapters that simulated hosts and devices keep, and the links over which they come. Pure.

Workers of one host share its memory, its disk and its link to the LoRA store; each has a link to its device. A link
carries one load at a time. An adapter is on its way to a tier once at a time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush
from itertools import count, islice
from typing import Final

from giornata.residency.ledger import EvictionLedger
from giornata.scheduling.adapters import NeededLora
from giornata.scheduling.worker_state import Attempt
from giornata.wire.workers import AdapterCounters, AdapterLoad, LoadSample, TemplateCounters, Tier
from giornata_lab.simulation.machines import TemplateStorage

Action = Callable[[float], None]
"""Called with the time at which it runs, in seconds."""


class SimClock:
    """Runs actions in order of time, and at equal times in the order in which they were planned; starts at 0."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Action]] = []
        self._numbers = count()

    def at(self, time_s: float, action: Action) -> None:
        """Plan `action`, not before now."""
        heappush(self._due, (max(time_s, self.now), next(self._numbers), action))

    def step(self) -> bool:
        """Run the next action; False where there is none."""
        if not self._due:
            return False
        self.now, _, action = heappop(self._due)
        action(self.now)
        return True


class StageServers:
    """The servers of a stage, and one queue before them: first come, first served."""

    def __init__(self, servers: int, clock: SimClock) -> None:
        self._free, self._clock = servers, clock
        self._waiting: deque[tuple[float, Action]] = deque()

    def serve(self, seconds: float, now: float, then: Action) -> None:
        """Run `then` when a server has done work that takes so long alone; at once where there is none."""
        if not seconds:
            then(now)
        elif self._free:
            self._free -= 1
            self._clock.at(now + seconds, lambda ended: self._served(then, ended))
        else:
            self._waiting.append((seconds, then))

    def _served(self, then: Action, now: float) -> None:
        self._free += 1
        if self._waiting:
            seconds, following = self._waiting.popleft()
            self.serve(seconds, now, following)
        then(now)


TOLD: Final = 256
"""Templates or adapters of a tier that telemetry tells, as :class:`giornata.wire.workers.WorkerState` says."""


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


@dataclass(frozen=True)
class TemplateSetting:
    """How all workers keep templates."""

    size_bytes: float = 0.0
    """Size of one template; 0: all of them fit anywhere."""
    kv_bytes: float = 0.0
    """Keys and values that a row takes from memory a step; 0: loads are neglected."""
    preloaded: tuple[str, ...] = ()
    """Templates in memory of every worker from the start, the most popular first, as far as there is room."""


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


class LoadReason(StrEnum):
    """Why an adapter is loaded."""

    DEMAND = "demand"
    """Rows with it have come."""
    AHEAD = "ahead"
    """Rows with it wait, and probably come."""
    PLAN = "plan"
    """A plan of placement wants it here."""


@dataclass(frozen=True)
class AdapterSetting:
    """What workers keep of adapters, and how fast they load them, in bytes, seconds and bytes a second."""

    device_bytes: float = 2e9
    memory_bytes: float = 16e9
    disk_bytes: float = 100e9
    store_bytes_per_s: float = 0.5e9
    disk_bytes_per_s: float = 2e9
    link_bytes_per_s: float = 10e9
    store_latency_s: float = 0.0
    link_latency_s: float = 0.0
    """What every load takes beside its bytes."""
    keeps: bool = True
    """Whether devices keep adapters that no row uses; RROD's do not."""
    on_turn: bool = False
    """Whether adapters are loaded only when their rows have a place, as by the baselines of ROCK."""
    workers_a_host: int = 1
    """That share memory, disk and the link to the store."""

    def link(self, source: Tier | None) -> FifoLink:
        """A new link from there: from the store, from disk to memory, or from memory to the device."""
        rates = {
            None: (self.store_bytes_per_s, self.store_latency_s),
            Tier.DISK: (self.disk_bytes_per_s, 0.0),
            Tier.MEMORY: (self.link_bytes_per_s, self.link_latency_s),
        }
        return FifoLink(*rates[source])


PAPER: Final = AdapterSetting(
    device_bytes=512e6,
    memory_bytes=1e15,
    disk_bytes=0.0,
    store_bytes_per_s=65e6,
    store_latency_s=1.0,
    link_bytes_per_s=80e6,
    link_latency_s=4.0,
)
"""An adapter of 65 MB takes 4.8 s from the host, 6.8 s from the store (ROCK, Table 3, its best and its worst latency).
Every host's memory holds all adapters."""


class SimHost:
    """One machine: adapters in its memory and on its disk."""

    def __init__(self, setting: AdapterSetting, clock: SimClock) -> None:
        self._clock = clock
        self.memory = EvictionLedger(round(setting.memory_bytes))
        self.disk = EvictionLedger(round(setting.disk_bytes))
        self._links = {source: setting.link(source) for source in (None, Tier.DISK)}
        self._coming: dict[str, float] = {}
        """When each adapter that is on its way is in memory."""
        self.arrivals = 0
        """In memory, since the start."""

    def where(self, digest: str) -> Tier | None:
        """The fastest of its tiers that has an adapter or will have it."""
        if digest in self.memory or digest in self._coming:
            return Tier.MEMORY
        return Tier.DISK if digest in self.disk else None

    def bring(self, lora: NeededLora, told: Callable[[AdapterLoad], None], now: float) -> float:
        """Have an adapter in memory; when it is there."""
        if (coming := self._coming.get(lora.digest)) is not None:
            return coming
        if self.memory.use(lora.digest):
            return now
        source = Tier.DISK if self.disk.use(lora.digest) else None
        link = self._links[source]
        took_s, ends = link.takes_s(lora.size_bytes), link.load(lora.size_bytes, now)
        self._coming[lora.digest] = ends

        def arrived(_then: float) -> None:
            del self._coming[lora.digest]
            self.arrivals += 1
            if source is None:
                self.disk.add(lora.digest, lora.size_bytes)
            self.memory.add(lora.digest, lora.size_bytes)
            told(AdapterLoad(source=source, size_bytes=lora.size_bytes, load_ms=took_s * 1e3))

        self._clock.at(ends, arrived)
        return ends

    def plan(self, loras: Iterable[NeededLora], now: float) -> None:
        """Load what a plan wants here, one adapter at a time, while no row's load takes the link to the store."""
        for lora in loras:
            if self._links[None].wait_s(now):
                return
            if self.where(lora.digest) is None:
                self.bring(lora, lambda _: None, now)


class SimLoras:
    """The adapters of one worker.

    Args:
        setting: of its tiers and links.
        clock: on which loads end.
        told: hears of every hop that has ended.
        host: that it is on; by default one of its own.
    """

    def __init__(
        self,
        setting: AdapterSetting,
        clock: SimClock,
        told: Callable[[AdapterLoad], None],
        host: SimHost | None = None,
    ) -> None:
        self._setting, self._clock, self._told = setting, clock, told
        self.host = host or SimHost(setting, clock)
        self.device = EvictionLedger(round(setting.device_bytes))
        self._link = setting.link(Tier.MEMORY)
        self._coming: dict[str, float] = {}
        """When each adapter that is on its way is on the device."""
        self._arrivals = 0
        self._held: dict[Attempt, tuple[str, ...]] = {}
        self.hits: Counter[Tier | None] = Counter()
        """Adapters of rows that came, by where they were, those on their way included."""
        self.loaded: list[tuple[float, LoadReason]] = []
        """When loads onto the device began, and why."""

    def ready_s(self, loras: Iterable[NeededLora], now: float) -> float:
        """Load what rows need; when all of it is on the device."""
        ready = now
        for lora in loras:
            self.hits[self._where(lora.digest)] += 1
            self.device.use(lora.digest)
            ready = max(ready, self._bring(lora, LoadReason.DEMAND, now))
        return ready

    def hold(self, key: Attempt, loras: Iterable[NeededLora]) -> None:
        """Rows use these: they stay on the device until :meth:`release`."""
        self._held[key] = tuple(lora.digest for lora in loras)
        for digest in self._held[key]:
            self.device.pin(digest)

    def release(self, key: Attempt) -> None:
        """The rows have left."""
        for digest in self._held.pop(key, ()):
            self.device.unpin(digest)
            if not self._setting.keeps and digest not in self.device.pins:
                self.device.remove(digest)

    def ahead(self, loras: Iterable[NeededLora], now: float, why: LoadReason = LoadReason.AHEAD) -> None:
        """Load what rows will need, as far as it fits beside what rows use and what is on its way."""
        for lora in loras:
            here = lora.digest in self.device
            if here or lora.size_bytes <= self.device.room_bytes:
                self._bring(lora, why, now)
            else:
                self.host.bring(lora, self._told, now)

    @property
    def arrivals(self) -> int:
        """Return what has come to a tier since the start, of this worker or of its host."""
        return self.host.arrivals + self._arrivals

    def resident(self) -> dict[Tier, tuple[str, ...]]:
        """Adapters by tier, lately used first, as telemetry tells them."""
        device = (digest for digest in reversed(list(self.device)) if digest not in self._coming)
        tiers = {
            Tier.DEVICE: device,
            Tier.MEMORY: reversed(list(self.host.memory)),
            Tier.DISK: reversed(list(self.host.disk)),
        }
        return {tier: tuple(islice(names, TOLD)) for tier, names in tiers.items()}

    def counted(self) -> AdapterCounters:
        """Bytes by tier, as telemetry tells them."""
        return AdapterCounters(
            device_bytes=self.device.size_bytes,
            memory_bytes=self.host.memory.size_bytes,
            disk_bytes=self.host.disk.size_bytes,
        )

    def _where(self, digest: str) -> Tier | None:
        """The fastest tier that has it or will have it."""
        return Tier.DEVICE if digest in self.device else self.host.where(digest)

    def _bring(self, lora: NeededLora, why: LoadReason, now: float) -> float:
        """Have an adapter on the device; when it is there."""
        if lora.digest in self.device:
            return self._coming.get(lora.digest, now)
        in_memory = self.host.bring(lora, self._told, now)
        took_s, ends = self._link.takes_s(lora.size_bytes), self._link.load(lora.size_bytes, in_memory)
        self._coming[lora.digest] = ends
        self.device.pin(lora.digest)  # room is made when the load begins, and kept for it
        self.device.add(lora.digest, lora.size_bytes)
        self.loaded.append((now, why))

        def arrived(_now: float) -> None:
            del self._coming[lora.digest]
            self._arrivals += 1
            self.device.unpin(lora.digest)
            self._told(AdapterLoad(source=Tier.MEMORY, size_bytes=lora.size_bytes, load_ms=took_s * 1e3))

        self._clock.at(ends, arrived)
        return ends
