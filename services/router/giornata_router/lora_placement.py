"""The placement of LoRAs: what hosts hold and jobs use goes in, wanted sets go to stores.

Plans are made in a thread. A wanted set is written when it has changed, under a revision of the lease's epoch and a
number, so that a store tells a late plan of an earlier router from a new one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
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
    use_plan,
)
from giornata.scheduling.placement import Placement
from giornata.wire import codec, subjects
from giornata.wire.errors import GiornataError
from giornata.wire.loras import (
    MESSAGE_BYTES,
    MOST_WANTED,
    LoraRecord,
    LoraState,
    TierSnapshot,
    TierSnapshotRequest,
    WantedFiles,
    packed,
)
from giornata.wire.workers import ServiceName, ServiceState
from giornata_router.config import RouterConfig
from giornata_router.leadership import Leadership

REGISTERED_S: Final = 600.0
"""How long a LoRA that no host has counts as newly registered."""
LOOK_S: Final = 0.25
"""How often gaps in what is known of the host tiers are looked for."""
SNAPSHOT_MS: Final = 5_000

log = structlog.get_logger(__name__)


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


def observed(catalogue: LoraCatalogue, tiers: HostTiers, unix_s: float) -> ResidencySnapshot:
    """The host tiers now, and the LoRAs that are ready; `unix_s` is Unix time."""
    hosts = tuple(
        AdapterTier(name, told.budget_bytes, dict(tiers.held(name)))
        for name in tiers.names()
        if (told := tiers.told(name))
    )
    held = {digest for host in hosts for digest in host.held}
    registered = frozenset(
        digest
        for digest, created_s in catalogue.created_s.items()
        if digest not in held and unix_s - created_s < REGISTERED_S
    )
    return ResidencySnapshot(hosts, catalogue.sizes, catalogue.pinned, registered)


class LoraPlacementPlanner:
    """The active router's planner of where LoRAs go; a standby only listens."""

    def __init__(self, bus: Bus, placement: Placement, config: RouterConfig) -> None:
        self._bus, self._placement, self._period_s = bus, placement, config.placement_s
        self._tiers = HostTiers()
        placement.hosts(self._tiers)
        self._uses = AdapterUsage()
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
                if self._tiers.names() and time.monotonic() - self._planned_s >= self._period_s:
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
        seen = observed(LoraCatalogue.of(mirror.all()), self._tiers, time.time())
        wanted = await asyncio.to_thread(use_plan, seen, self._uses.copy(), time.monotonic())
        log.debug("planned", places=len(wanted))
        for tier, digests in wanted.items():
            if frozenset(digests) != self._written.get(tier):
                await self._write(tier, digests, leadership)

    async def _write(self, tier: str, digests: tuple[str, ...], leadership: Leadership) -> None:
        self._number += 1
        told = WantedFiles(
            epoch=leadership.check(), number=self._number, sha256s=packed(digests[:MOST_WANTED])
        )
        bucket = await self._bus.jetstream.key_value(subjects.WANTED)
        await bucket.put(subjects.wanted_key(tier), codec.encode(told))
        self._written[tier] = frozenset(digests)
