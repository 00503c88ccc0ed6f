"""LoRAs and ControlNets of simulated jobs, and the LoRAs that a simulated worker keeps. Pure.

Every LoRA is on its way once at a time, and so many loads run side by side as in the denoiser. Rows wait for theirs.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from giornata.planning.operations import low_rank_weights
from giornata.scheduling.adapters import NeededControl, NeededLora, by_tier, faster
from giornata.scheduling.incoming import LANES
from giornata.wire.workers import AdapterLoad, Tier
from giornata_tools.loadgen import facts
from giornata_tools.loadgen.distributions import Mix, chosen, zipf
from giornata_tools.simulation.jobs import SimulatedJob
from giornata_tools.simulation.processors import Clock
from giornata_tools.simulation.templates import TOLD


@dataclass(frozen=True)
class AdapterWorkload:
    """What jobs ask for."""

    loras: Mix = field(default_factory=lambda: {0: 1.0})
    """Number of LoRAs of a job."""
    controls: Mix = field(default_factory=lambda: {0: 1.0})
    """Number of ControlNets of a job."""
    lora_count: int = facts.LORAS
    """Distinct ones."""
    lora_zipf: float = facts.LORA_ZIPF
    """Exponent of their popularity."""

    @classmethod
    def of(cls, service: str, lora_count: int = facts.LORAS) -> AdapterWorkload:
        """That of one of :data:`giornata_tools.loadgen.facts.ADAPTERS`, with so many distinct LoRAs."""
        known = facts.ADAPTERS[service]
        return cls(known["loras"], known["controlnets"], lora_count)


@dataclass(frozen=True)
class AdapterSetting:
    """What workers keep of LoRAs, and how fast they load them, in bytes and bytes a second."""

    device_bytes: float = 2e9
    memory_bytes: float = 16e9
    disk_bytes: float = 100e9
    store_bytes_per_s: float = 0.5e9
    disk_bytes_per_s: float = 2e9
    link_bytes_per_s: float = 10e9

    def hop_s(self, source: Tier | None, size_bytes: float) -> float:
        """Time of one hop from there."""
        rates = {
            None: self.store_bytes_per_s,
            Tier.DISK: self.disk_bytes_per_s,
            Tier.MEMORY: self.link_bytes_per_s,
        }
        return size_bytes / rates[source]


def with_adapters(jobs: Sequence[SimulatedJob], workload: AdapterWorkload, seed: int) -> list[SimulatedJob]:
    """The same jobs with adapters; equal seeds draw equal ones. A job has each at most once."""
    chance = random.Random(f"{seed} adapters")  # noqa: S311 - a workload, no secret
    lora_weights, control_weights = zipf(workload.lora_count, workload.lora_zipf), facts.controlnets()
    made = []
    for job in jobs:
        loras = _distinct(chosen(workload.loras, chance.random()), lora_weights, chance)
        controls = _distinct(chosen(workload.controls, chance.random()), control_weights, chance)
        made.append(_with(job, [lora_of(number) for number in loras], controls))
    return made


def lora_of(number: int) -> NeededLora:
    """The LoRA of this rank of popularity; sizes alternate between the published ones."""
    return NeededLora(f"lora{number}", facts.LORA_BYTES[number % len(facts.LORA_BYTES)])


def control_name(number: int) -> str:
    """The digest of the ControlNet of this rank of popularity."""
    return f"control{number}"


def held_controls(weight_bytes: int) -> tuple[tuple[str, int], ...]:
    """All ControlNets, of this size, for :attr:`giornata_tools.simulation.machines.Machine.controls`."""
    return tuple((control_name(number), weight_bytes) for number in facts.controlnets())


def _with(job: SimulatedJob, loras: Sequence[NeededLora], controls: Iterable[int]) -> SimulatedJob:
    low_rank = sum(low_rank_weights(0, lora.size_bytes) for lora in loras)
    shapes = tuple(
        replace(shape, low_rank=low_rank, segments=1 / shape.sequences if loras else 0.0)
        for shape in job.demand.shapes
    )
    needed = tuple(NeededControl(control_name(number), 1.0) for number in controls)
    return replace(job, demand=replace(job.demand, shapes=shapes, adapters=tuple(loras), controls=needed))


def _distinct(count: int, weights: Mix, chance: random.Random) -> list[int]:
    found: dict[int, None] = {}
    while len(found) < min(count, len(weights)):
        found[chosen(weights, chance.random())] = None
    return list(found)


class SimLoras:
    """The LoRAs of one worker: what each tier holds, least recently used out first, and what is on its way."""

    def __init__(self, setting: AdapterSetting, clock: Clock, told: Callable[[AdapterLoad], None]) -> None:
        self._setting, self._clock, self._told = setting, clock, told
        most = {
            Tier.DEVICE: setting.device_bytes,
            Tier.MEMORY: setting.memory_bytes,
            Tier.DISK: setting.disk_bytes,
        }
        self._tiers = {tier: _Held(bytes_) for tier, bytes_ in most.items()}
        self._lanes = [0.0] * LANES
        """When each is free."""
        self._coming: dict[tuple[str, Tier], float] = {}
        """When a LoRA is in a tier, of those that are on their way there."""
        self.hits: Counter[Tier | None] = Counter()
        """LoRAs of rows that came, by where they were, those on their way included."""

    def ready_s(self, loras: Iterable[NeededLora], now: float) -> float:
        """Load what rows need; when all of it is on the device."""
        ready = now
        for lora in loras:
            self.hits[self._where(lora.digest)] += 1
            ready = max(ready, self._bring(lora, Tier.DEVICE, now))
        return ready

    def prefetch(self, loras: Iterable[NeededLora], now: float) -> None:
        """Load what rows will need."""
        for lora in loras:
            self._bring(lora, Tier.DEVICE, now)

    def resident(self) -> dict[Tier, tuple[str, ...]]:
        """LoRAs by tier, lately used first, as telemetry tells them."""
        return {tier: tuple(islice(reversed(held.sizes), TOLD)) for tier, held in self._tiers.items()}

    def _where(self, digest: str) -> Tier | None:
        """The fastest tier that has it or will have it."""
        found = by_tier({tier: held.sizes for tier, held in self._tiers.items()}).get(digest)
        for name, tier in self._coming:
            if name == digest:
                found = faster(found, tier)
        return found

    def _bring(self, lora: NeededLora, to: Tier, now: float) -> float:
        """Have a LoRA in this tier; when it is there."""
        here = next((tier for tier in (Tier.DEVICE, Tier.MEMORY) if self._tiers[tier].use(lora.digest)), None)
        if here is Tier.DEVICE or here is to:
            return now
        if (coming := self._coming.get((lora.digest, to))) is not None:
            return coming
        if to is Tier.DEVICE:
            ready = now if here is Tier.MEMORY else self._bring(lora, Tier.MEMORY, now)
            return self._hop(lora, Tier.MEMORY, to, ready)
        source = Tier.DISK if self._tiers[Tier.DISK].use(lora.digest) else None
        lane = min(range(LANES), key=self._lanes.__getitem__)
        self._lanes[lane] = self._hop(lora, source, to, max(now, self._lanes[lane]))
        return self._lanes[lane]

    def _hop(self, lora: NeededLora, source: Tier | None, to: Tier, begins: float) -> float:
        took_s = self._setting.hop_s(source, lora.size_bytes)
        ends = self._coming[lora.digest, to] = begins + took_s

        def arrived(_now: float) -> None:
            del self._coming[lora.digest, to]
            self._tiers[to].put(lora)
            if source is None:
                self._tiers[Tier.DISK].put(lora)
            self._told(AdapterLoad(source=source, size_bytes=lora.size_bytes, load_ms=took_s * 1e3))

        self._clock.at(ends, arrived)
        return ends


class _Held:
    """LoRAs by size, the last used last, within a budget."""

    def __init__(self, most_bytes: float) -> None:
        self.sizes: OrderedDict[str, int] = OrderedDict()
        self._most_bytes, self._bytes = most_bytes, 0

    def use(self, digest: str) -> bool:
        """Whether it is here; it is used now."""
        if digest in self.sizes:
            self.sizes.move_to_end(digest)
            return True
        return False

    def put(self, lora: NeededLora) -> None:
        """Keep it as the last used."""
        self._bytes += lora.size_bytes - self.sizes.pop(lora.digest, 0)
        self.sizes[lora.digest] = lora.size_bytes
        while self._bytes > self._most_bytes:
            _, gone = self.sizes.popitem(last=False)
            self._bytes -= gone
