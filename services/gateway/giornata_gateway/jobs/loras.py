"""The tenants' LoRAs: read from their records, changed by the LoRA store alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Final, NamedTuple

from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.records import BucketMirror, LoraRecords, owner_of
from giornata.wire import subjects
from giornata.wire.adapters import LoraUse
from giornata.wire.errors import LoraLimit, LoraNotFound
from giornata.wire.loras import EVERYONE, LoraRecord, LoraState, PinLora, RemoveLora
from giornata.wire.models import ModelCard
from giornata.wire.requests import GenerationParameters
from giornata_gateway.config import GatewayConfig
from giornata_gateway.fleet import FleetListener
from giornata_gateway.intake.rules.adapters import LORAS_FIELD, use_of

ANSWER_MS: Final = 10_000
SORTED: Final = 64
"""Tenants whose lists are kept sorted."""


class _SortedLoras(NamedTuple):
    seen: int
    """The mirror's, when they were sorted."""
    records: Sequence[LoraRecord]


@dataclass(frozen=True)
class Loras:
    """The LoRA store as tenants see it: their own LoRAs, and those that are shared with all."""

    config: GatewayConfig
    bus: Bus
    records: LoraRecords
    fleet: FleetListener
    _sorted: dict[str, _SortedLoras] = field(default_factory=dict)
    """The latest lists, by tenant, the last asked for last."""

    @cached_property
    def mirror(self) -> BucketMirror[LoraRecord]:
        """Every LoRA, for lists and counts."""
        return BucketMirror(self.records.bucket)

    def model(self, name: str | None) -> str:
        """The model that a LoRA is for; ModelNotFound where none of this name is served, or several without one."""
        return self.fleet.choose(name).name

    async def check_room(self, tenant: str) -> None:
        """Raise LoraLimit where the tenant has no room for another LoRA; uploads at once may exceed it."""
        await self.mirror.refresh()
        own, most = self.mirror.of(owner_of(tenant)), self.config.max_loras
        if len(own) >= most:
            raise LoraLimit(received=f"{len(own) + 1} LoRAs", accepted=f"at most {most}; delete one")

    async def get(self, tenant: str, lora_id: str) -> LoraRecord:
        """A LoRA that the tenant may use; LoraNotFound, too, where it is another tenant's."""
        try:
            return await self.records.get(tenant, lora_id)
        except LoraNotFound:
            return await self.records.get(EVERYONE, lora_id)

    async def used(self, tenant: str, asked: GenerationParameters, card: ModelCard) -> tuple[LoraUse, ...]:
        """The LoRAs that a tenant's request names, as a job of the model `card` keeps them.

        Raises:
            LoraNotFound, LoraNotReady, LoraMismatch: names the field, and what is accepted.
        """
        try:
            records = await asyncio.gather(*(self.get(tenant, one.id) for one in asked.loras))
        except LoraNotFound as error:
            raise LoraNotFound(
                field=LORAS_FIELD, received=error.received, accepted="an id that GET /v1/loras tells"
            ) from error
        found = zip(asked.loras, records, strict=True)
        return tuple(use_of(one, record, card, asked.lora_wait, asked.lora_join) for one, record in found)

    async def settled(self, tenant: str, lora_id: str, deadline: Deadline) -> LoraRecord:
        """The LoRA of :meth:`get` once it is ready or has failed, or as it is at the deadline."""
        record = await self.get(tenant, lora_id)
        return await self.records.until(record.tenant, lora_id, lambda now: now.state.settled, deadline)

    async def of(self, tenant: str) -> Sequence[LoraRecord]:
        """The LoRAs that a tenant may use, and its uploads, the newest first."""
        await self.mirror.refresh()
        known = self._sorted.get(tenant)
        if known is None or known.seen != self.mirror.seen:
            known = _SortedLoras(self.mirror.seen, self._usable(tenant))
        self._sorted.pop(tenant, None)
        self._sorted[tenant] = known
        if len(self._sorted) > SORTED:
            del self._sorted[next(iter(self._sorted))]
        return known.records

    def _usable(self, tenant: str) -> list[LoraRecord]:
        own, shared = self.mirror.of(owner_of(tenant)), self.mirror.of(owner_of(EVERYONE))
        usable = [record for record in shared if record.state is LoraState.READY]
        return sorted([*own, *usable], key=attrgetter("created_s", "lora_id"), reverse=True)

    async def pin(self, tenant: str, lora_id: str, *, pinned: bool) -> LoraRecord:
        """Have every host keep a tenant's own LoRA, or no longer.

        Raises:
            LoraNotFound: the tenant has none of this id.
            LoraLimit: the tenant has as many pinned ones as it may have.
            LoraNotReady, LoraPinsFull: the LoRA store refuses it.
        """
        await self.records.get(tenant, lora_id)
        if pinned:
            await self.mirror.refresh()
            others = sum(one.pinned and one.lora_id != lora_id for one in self.mirror.of(owner_of(tenant)))
            most = self.config.max_pinned_loras
            if others >= most:
                raise LoraLimit(received=f"{others + 1} pinned LoRAs", accepted=f"at most {most}; unpin one")
        request = PinLora(lora_id=lora_id, tenant=tenant, pinned=pinned, remaining_ms=ANSWER_MS)
        return await self.bus.call(subjects.lora("pin"), request, LoraRecord, Deadline.after_ms(ANSWER_MS))

    async def delete(self, tenant: str, lora_id: str) -> None:
        """Forget a tenant's own LoRA or upload; edits that have begun end as before."""
        await self.records.get(tenant, lora_id)
        request = RemoveLora(lora_id=lora_id, tenant=tenant, remaining_ms=ANSWER_MS)
        await self.bus.call(subjects.lora("remove"), request, LoraRecord, Deadline.after_ms(ANSWER_MS))
