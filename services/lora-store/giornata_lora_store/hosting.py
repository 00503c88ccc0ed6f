"""The host tier within a store: opened with its folder, told of plans and pins, and closed with the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from giornata.bus import streams
from giornata.bus.answering import Endpoint
from giornata.bus.bus import Bus
from giornata.tenant_records import LoraRecords
from giornata.wire import subjects
from giornata.wire.host_tiers import HostTier, TierLoadRequest, TierSnapshotRequest
from giornata.wire.loras import MESSAGE_BYTES, LoraRecord
from giornata_lora_store.config import LoraStoreConfig
from giornata_lora_store.files import LoraFiles
from giornata_lora_store.host_folder import HostFolder
from giornata_lora_store.host_tier import HostTierLoader
from giornata_lora_store.wanting import HostTierPlan, LoraPins, follow_plan, follow_records


class HostTierService:
    """What a store does for its host tier. Make it with :func:`hosting`."""

    def __init__(self, config: LoraStoreConfig, bus: Bus, desk: HostTierLoader, pins: LoraPins) -> None:
        self._config, self._bus, self._desk, self._pins = config, bus, desk, pins
        self._plan = HostTierPlan()

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """What it answers."""
        return (
            Endpoint(subjects.bring(self._desk.name), TierLoadRequest, self._desk.bring),
            Endpoint(
                subjects.tier(self._config.instance),
                TierSnapshotRequest,
                self._desk.snapshot,
                limit_bytes=MESSAGE_BYTES,
            ),
        )

    def told(self) -> HostTier:
        """Telemetry."""
        return self._desk.told(self._plan.taken, self._plan.ignored)

    def repin(self) -> None:
        """Pins, or the plan, have changed."""
        self._desk.want(self._pins.digests(), self._plan.wanted())

    async def run(self) -> None:
        """Follow the plan, and bring what they want, for ever."""
        config = self._config
        made = partial(
            streams.ensure_shared,
            self._bus.jetstream,
            replicas=config.replicas,
            events_ttl_s=config.result_ttl_s,
            store_bytes=config.nats_store_bytes,
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                follow_plan(self._bus.jetstream, self._desk.name, self._take, made, config.lora_scan_s),
                name="plan",
            )
            tasks.create_task(self._desk.run(config.lora_scan_s), name="bring")

    def _take(self, value: bytes | None) -> None:
        if self._plan.take(value):
            self.repin()


@asynccontextmanager
async def hosting(
    config: LoraStoreConfig, bus: Bus, files: LoraFiles, pins: LoraPins
) -> AsyncIterator[HostTierService | None]:
    """The host tier that a configuration asks for; None where it asks for none.

    Raises:
        Failed: its folder cannot be used, or is another store's.
    """
    if config.lora_host_folder is None:
        yield None
        return
    folder = await asyncio.to_thread(HostFolder, config.lora_host_folder, config.lora_host_name)
    try:
        async with asyncio.TaskGroup() as loads:
            desk = HostTierLoader(
                loads, folder, files, config.lora_host_mb << 20, config.lora_plan_mb_s * (1 << 20)
            )
            try:
                yield HostTierService(config, bus, desk, pins)
            finally:
                desk.close()
    finally:
        folder.close()


async def follow_pins(records: LoraRecords, pins: LoraPins, hosting: HostTierService | None) -> None:
    """Tell `pins` of every record, and the host tier of every change of them, for ever."""

    def take(key: str, record: LoraRecord | None) -> None:
        if pins.take(key, record) and hosting is not None:
            hosting.repin()

    await follow_records(records, take)
