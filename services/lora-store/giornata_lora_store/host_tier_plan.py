"""The wanted set of a host tier: the router's plan, and what the catalogue pins."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import nats.errors
import structlog
from nats.js import JetStreamContext
from nats.js.errors import APIError
from nats.js.kv import KeyValue

from giornata.deadlines import heed_cancel
from giornata.records import LoraRecords
from giornata.residency.host_tiers import HostTiers
from giornata.wire import codec, stores
from giornata.wire.errors import LoraNotReady, LoraPinsFull, SchemaMismatch
from giornata.wire.loras import LoraRecord, LoraState, PinLora, WantedFiles
from giornata.wire.workers import ServiceState

AGAIN_S: Final = 1.0
"""Pause before a bucket that cannot be followed is followed again."""

log = structlog.get_logger(__name__)


class HostTierPlan:
    """The latest wanted set for one tier."""

    def __init__(self) -> None:
        self.taken = self.ignored = 0
        self._known: WantedFiles | None = None

    def take(self, value: bytes | None) -> bool:
        """Take in what is wanted now, None where it was removed; whether anything has changed.

        What is unreadable, or older than one before, is ignored, counted and logged.
        """
        known = self._known
        if value is None:
            self._known = None
            return known is not None
        try:
            wanted = codec.decode(WantedFiles, value)
        except (SchemaMismatch, ValueError) as error:
            self._ignore("unreadable", str(error))
            return False
        if known is not None and wanted.revision <= known.revision:
            if wanted.revision < known.revision:
                self._ignore("older", f"{wanted.revision} after {known.revision}")
            return False
        self._known = wanted
        self.taken += 1
        return True

    def wanted(self) -> tuple[str, ...]:
        """Digests, the most wanted first."""
        return self._known.digests if self._known else ()

    def _ignore(self, why: str, what: str) -> None:
        self.ignored += 1
        log.warning("plan_ignored", why=why, what=what[:200])


class LoraPins:
    """The LoRAs that the catalogue pins, and how many bytes it may: the least budget of the known host tiers."""

    def __init__(self, records: LoraRecords) -> None:
        self._records = records
        self._tiers = HostTiers()
        self._known: dict[str, tuple[str, int]] = {}
        """Digest and bytes by the key of the record."""

    def hear(self, state: ServiceState) -> None:
        """Take in telemetry of a LoRA store."""
        if state.host_tier is None:
            return
        if state.draining:
            self._tiers.forget(state.instance)
        else:
            self._tiers.observe(state.instance, state.host_tier)

    def digests(self) -> tuple[str, ...]:
        """Pinned files."""
        return tuple(sorted({digest for digest, _ in self._known.values()}))

    def take(self, key: str, record: LoraRecord | None) -> bool:
        """Take in a record; whether pins have changed."""
        before = self._known.get(key)
        if record is not None and record.pinned and record.canonical is not None:
            self._known[key] = record.canonical.file.sha256, record.canonical.file.size_bytes
        else:
            self._known.pop(key, None)
        return self._known.get(key) != before

    async def pin(self, request: PinLora) -> LoraRecord:
        """Pin a LoRA to every host, or no longer.

        Raises:
            LoraNotFound: there is no such LoRA.
            LoraNotReady: it has no canonical file yet.
            LoraPinsFull: all that is pinned would not fit into a host tier.
        """
        return await self._records.change(
            request.tenant, request.lora_id, lambda known: self._pinned(known, request)
        )

    def _pinned(self, record: LoraRecord, request: PinLora) -> LoraRecord | None:
        if record.pinned == request.pinned:
            return None
        if request.pinned:
            if record.state is not LoraState.READY or record.canonical is None:
                raise LoraNotReady(received=record.state.value, accepted=LoraState.READY.value)
            file = record.canonical.file
            pinned = dict(self._known.values()) | {file.sha256: file.size_bytes}
            budgets = [told.budget_bytes for name in self._tiers.names() if (told := self._tiers.told(name))]
            most = min(budgets, default=0)
            if sum(pinned.values()) > most:
                raise LoraPinsFull(
                    received=f"{sum(pinned.values())} bytes of pinned LoRAs",
                    accepted=f"at most {most}, of the smallest host tier"
                    if budgets
                    else "none: no host tier runs",
                )
        return record.model_copy(update={"pinned": request.pinned})


async def follow_plan(
    jetstream: JetStreamContext,
    tier: str,
    take: Callable[[bytes | None], None],
    made: Callable[[], Awaitable[None]],
    look_s: float,
) -> None:
    """Tell `take` of every wanted set of a tier, for ever; a bucket that is gone is `made` again.

    The bucket is opened again every `look_s`: a watcher does not tell that its bucket was replaced.
    """
    while True:
        heed_cancel()
        try:
            bucket = await jetstream.key_value(stores.WANTED)
            await _followed(bucket, stores.wanted_key(tier), take, look_s)
        except (nats.errors.Error, APIError) as error:
            log.warning("plan_not_followed", error=repr(error))
            await asyncio.sleep(AGAIN_S)  # the server is away; nothing tells of its return
            try:
                await made()
            except Exception as failed:  # noqa: BLE001 - the task's edge: logged, and tried again
                log.warning("bucket_not_made", error=repr(failed))


async def _followed(bucket: KeyValue, key: str, take: Callable[[bytes | None], None], look_s: float) -> None:
    watcher = await bucket.watch(key)
    try:
        heed_cancel()
        async with asyncio.timeout(look_s):
            async for entry in watcher:
                if entry is not None:
                    take(None if entry.operation is not None else entry.value)
    except TimeoutError:
        pass
    finally:
        await watcher.stop()  # type: ignore[no-untyped-call]  # nats-py annotates it in part


async def follow_records(records: LoraRecords, take: Callable[[str, LoraRecord | None], None]) -> None:
    """Tell `take` of every record of a LoRA and of every change, for ever."""
    while True:
        heed_cancel()
        try:
            async for key, record in records.bucket.changes(">"):
                take(key, record)
        except (nats.errors.Error, APIError, SchemaMismatch) as error:
            log.warning("records_not_followed", error=repr(error))
        await asyncio.sleep(AGAIN_S)  # the server is away; nothing tells of its return
