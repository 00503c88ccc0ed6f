"""The placement of LoRAs: what hosts hold and jobs use goes in, wanted sets go to stores and workers.

Plans are made in a thread. A wanted set is written when it has changed, under a revision of the lease's epoch and a
number, so that a store tells a late plan of an earlier router from a new one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import nats.errors
import structlog
from nats.js.errors import APIError

from giornata.bus.bus import Bus
from giornata.deadlines import Deadline, heed_cancel
from giornata.records import BucketMirror, LoraRecords
from giornata.residency.use_based import (
    AdapterTier,
    AdapterUsage,
    HostTiers,
    ResidencySnapshot,
    TierKind,
    Wanted,
)
from giornata.scheduling.placement import Placement
from giornata.scheduling.rock import PLANNERS, AdapterPlan
from giornata.wire import codec, subjects
from giornata.wire.errors import GiornataError
from giornata.wire.loras import (
    MESSAGE_BYTES,
    MOST_WANTED,
    HostTier,
    LoraRecord,
    LoraState,
    StoredFile,
    TierSnapshot,
    TierSnapshotRequest,
    WantedFiles,
    packed,
)
from giornata.wire.messages import LoadLoras
from giornata.wire.workers import ServiceName, ServiceState, Tier
from giornata_router.config import RouterConfig
from giornata_router.leadership import Leadership

REGISTERED_S: Final = 600.0
"""How long a LoRA that no host has counts as newly registered."""
ASSUMED_BYTES_PER_S: Final = 5e8
"""Rate of a host's link, before one was measured."""


@dataclass(frozen=True)
class LoraCatalogue:
    """The LoRAs that are ready, by the digest of their canonical file."""

    sizes: Mapping[str, int]
    pinned: frozenset[str]
    created_s: Mapping[str, int]
    """Unix time at which each was registered first."""

    @classmethod
    def of(cls, records: Iterable[LoraRecord]) -> LoraCatalogue:
        """The catalogue in records; several of one file are one."""
        sizes: dict[str, int] = {}
        created_s: dict[str, int] = {}
        pinned = set[str]()
        for record in records:
            if record.state is not LoraState.READY or record.canonical is None:
                continue
            file = record.canonical.file
            sizes[file.sha256] = file.size_bytes
            created_s[file.sha256] = min(record.created_s, created_s.get(file.sha256, record.created_s))
            if record.pinned:
                pinned.add(file.sha256)
        return cls(sizes, frozenset(pinned), created_s)


def observed(
    catalogue: LoraCatalogue,
    tiers: HostTiers,
    workers: Iterable[ServiceState],
    adapters: Callable[[str], Mapping[str, Tier]],
    unix_s: float,
) -> ResidencySnapshot:
    """The cluster now.

    Args:
        catalogue: the LoRAs that are ready.
        tiers: the host tiers.
        workers: telemetry of all workers.
        adapters: the fastest tier of each LoRA that a worker has, by digest.
        unix_s: Unix time.
    """
    hosts = [_host(name, told, tiers.held(name)) for name in tiers.names() if (told := tiers.told(name))]
    held = {digest for host in hosts for digest in host.held}
    registered = frozenset(
        digest
        for digest, created_s in catalogue.created_s.items()
        if digest not in held and unix_s - created_s < REGISTERED_S
    )
    devices = _devices(workers, adapters, catalogue.sizes)
    return ResidencySnapshot((*hosts, *devices), catalogue.sizes, catalogue.pinned, registered)


def _host(name: str, told: HostTier, held: Mapping[str, int]) -> AdapterTier:
    return AdapterTier(
        name,
        TierKind.HOST,
        name,
        told.budget_bytes,
        dict(held),
        bytes_per_s=told.bytes_per_s or ASSUMED_BYTES_PER_S,
    )


def _devices(
    workers: Iterable[ServiceState],
    adapters: Callable[[str], Mapping[str, Tier]],
    sizes: Mapping[str, int],
) -> Iterator[AdapterTier]:
    """Workers that tell how many bytes of LoRAs their memory holds."""
    for state in workers:
        worker = state.worker
        if worker is None or worker.adapters is None or not worker.adapters.memory_limit_bytes:
            continue
        here = adapters(state.instance)
        held = {
            digest: sizes[digest]
            for digest, tier in here.items()
            if tier in {Tier.DEVICE, Tier.MEMORY} and digest in sizes
        }
        yield AdapterTier(
            state.instance,
            TierKind.DEVICE,
            worker.lora_host or state.host,
            worker.adapters.memory_limit_bytes,
            held,
        )


LOOK_S: Final = 0.25
"""How often gaps in what is known of the host tiers are looked for."""
SNAPSHOT_MS: Final = 5_000
AT_ONCE: Final = 32
"""Most LoRAs that a worker is told to load at a time."""

log = structlog.get_logger(__name__)


class LoraPlacementPlanner:
    """The active router's planner of where LoRAs go; a standby only listens."""

    def __init__(self, bus: Bus, placement: Placement, config: RouterConfig) -> None:
        self._bus, self._placement, self._config = bus, placement, config
        self._tiers = HostTiers()
        placement.hosts(self._tiers)
        self._planner = PLANNERS.get(config.adapter_plan)
        self._plan = self._planner and self._planner.make(config.placement_seed)
        self._uses = AdapterUsage(self._planner.half_life_s) if self._planner else AdapterUsage()
        self._period_s = config.placement_s or (self._planner.period_s if self._planner else 0.0)
        self._written: dict[str, frozenset[str]] = {}
        self._number = 0
        self._planned_s = -float("inf")

    def observe(self, state: ServiceState) -> None:
        """Take in telemetry of a LoRA store; that of others is passed over."""
        if state.service is not ServiceName.LORA_STORE or state.host_tier is None:
            return
        if state.draining:
            self._tiers.forget(state.instance)
        else:
            self._tiers.observe(state.instance, state.host_tier)

    def look(self) -> None:
        """Forget the tiers of stores that are silent."""
        self._tiers.keep({state.instance for state in self._placement.fleet.all()})

    def see(self, adapters: Iterable[str]) -> None:
        """A job asks for these LoRAs, by digest of their canonical files."""
        self._uses.see(adapters, time.monotonic())

    async def run(self, leadership: Leadership) -> None:
        """Ask for what was missed, and plan when it is time, for ever; nothing is written once the lease has ended."""
        self._written, self._planned_s, mirror = {}, -float("inf"), None
        while True:
            heed_cancel()
            try:
                await self._ask_gaps()
                if self._planner is None:  # what an earlier router wanted is wanted no longer
                    for tier in self._tiers.names():
                        if tier not in self._written:
                            await self._write(tier, (), leadership)
                elif time.monotonic() - self._planned_s >= self._period_s and (
                    self._tiers.names() or self._config.adapter_plan is not AdapterPlan.USE
                ):  # a plan has places: hosts, or workers where it fills them
                    if mirror is None:
                        mirror = BucketMirror((await LoraRecords.open(self._bus.jetstream)).bucket)
                    await self._round(mirror, leadership)
                    self._planned_s = time.monotonic()
            except (nats.errors.Error, APIError, GiornataError) as error:
                log.warning("not_planned", error=repr(error))
            await asyncio.sleep(LOOK_S)  # the rate of plans, not a poll

    async def _ask_gaps(self) -> None:
        for name, instance in self._tiers.gaps().items():
            request = TierSnapshotRequest(remaining_ms=SNAPSHOT_MS)
            try:
                snapshot = await self._bus.call(
                    subjects.tier(instance),
                    request,
                    TierSnapshot,
                    Deadline.after_ms(SNAPSHOT_MS),
                    limit_bytes=MESSAGE_BYTES,
                )
            except GiornataError as error:
                log.info("tier_not_reported", tier=name, instance=instance, error=str(error))
                continue
            self._tiers.snapshot(instance, snapshot)

    async def _round(self, mirror: BucketMirror[LoraRecord], leadership: Leadership) -> None:
        await mirror.refresh()
        workers = [state for state in self._placement.fleet.all() if state.worker is not None]
        seen = observed(
            LoraCatalogue.of(mirror.all()), self._tiers, workers, self._placement.adapters, time.time()
        )
        plan, uses, now = self._plan, self._uses.copy(), time.monotonic()
        if plan is None:
            return
        began_s = time.thread_time()
        wanted = await asyncio.to_thread(plan, seen, uses, now)
        log.debug("planned", places=len(wanted), own_s=time.thread_time() - began_s)
        await self._tell(seen, wanted, leadership)

    async def _tell(self, seen: ResidencySnapshot, wanted: Wanted, leadership: Leadership) -> None:
        for place in seen.places:
            digests = wanted.get(place.name)
            if digests is None:
                continue
            if place.kind is TierKind.DEVICE:
                lacking = [digest for digest in digests if digest not in place.held][:AT_ONCE]
                if lacking:
                    files = tuple(StoredFile(sha256=one, size_bytes=seen.sizes[one]) for one in lacking)
                    message = LoadLoras(files=files, epoch=leadership.check())
                    await self._bus.publish(subjects.worker(place.name, "load"), message)
            elif frozenset(digests) != self._written.get(place.name):
                await self._write(place.name, digests, leadership)

    async def _write(self, tier: str, digests: tuple[str, ...], leadership: Leadership) -> None:
        self._number += 1
        told = WantedFiles(
            epoch=leadership.check(), number=self._number, sha256s=packed(digests[:MOST_WANTED])
        )
        bucket = await self._bus.jetstream.key_value(subjects.WANTED)
        await bucket.put(subjects.wanted_key(tier), codec.encode(told))
        self._written[tier] = frozenset(digests)
