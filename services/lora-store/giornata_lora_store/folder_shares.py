"""Whose bytes the folder holds, so that no tenant fills it alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from giornata.api_keys import DEFAULT_TENANT
from giornata.mirrors import BucketMirror
from giornata.shares import has_room
from giornata.tenant_records import LoraRecords
from giornata.wire.errors import LoraLimit, LoraStoreFull
from giornata.wire.loras import EVERYONE, LoraRecord
from giornata_lora_store.files import LoraFiles

MEASURED_BYTES: Final = 64 << 20
"""After so many bytes that came here the folder is measured again: other instances fill it, too."""


class TenantStorageQuotas:
    """The bytes of each tenant: of its uploads, its LoRAs, and its deleted LoRAs whose files are not swept yet.

    A file of several tenants counts for the one that had it first. What belongs to no tenant, such as the LoRAs that
    all share, makes the folder smaller.
    """

    def __init__(self, files: LoraFiles, records: LoraRecords) -> None:
        self._files, self._mirror = files, BucketMirror(records.bucket)
        self._sizes: dict[str, int] = {}
        self._owners: dict[str, str] = {}
        """By the name of a file, also after its record has gone."""
        self._held = Counter[str]()
        self._unmeasured = 0
        """Bytes that came here since the folder was measured."""

    def note(self, record: LoraRecord) -> None:
        """Remember the tenant of a record's files: the record may be gone when the folder is measured."""
        for name in names(record):
            self._owners.setdefault(name, record.tenant)

    async def measure(self) -> None:
        """Measure the folder's files and count them by tenant."""
        await self._mirror.refresh()
        sizes = await asyncio.to_thread(self._files.sizes)
        for record in sorted(self._mirror.all(), key=lambda one: one.created_s, reverse=True):
            self._owners |= dict.fromkeys(names(record), record.tenant)
        self._owners = {name: owner for name, owner in self._owners.items() if name in sizes}
        self._sizes, self._held, self._unmeasured = sizes, Counter(), 0
        for name, size_bytes in sizes.items():
            self._held[self._owners.get(name, EVERYONE)] += size_bytes

    async def check(self, tenant: str, upload_id: str, size_bytes: int) -> None:
        """Count an upload that grows to `size_bytes`.

        Raises:
            LoraLimit: the tenant has its share of the folder.
            LoraStoreFull: the folder is full.
        """
        if self._unmeasured >= MEASURED_BYTES or not self._fits(tenant, upload_id, size_bytes):
            await self.measure()
            if not self._fits(tenant, upload_id, size_bytes):
                raise self._refusal(tenant, upload_id, size_bytes)
        growth = self._growth(upload_id, size_bytes)
        self._owners[upload_id] = tenant
        self._sizes[upload_id] = self._sizes.get(upload_id, 0) + growth
        self._held[tenant] += growth
        self._unmeasured += growth

    def _growth(self, upload_id: str, size_bytes: int) -> int:
        return max(0, size_bytes - self._sizes.get(upload_id, 0))

    def _fits(self, tenant: str, upload_id: str, size_bytes: int, *, alone: bool = False) -> bool:
        held = {name: has for name, has in self._held.items() if name != EVERYONE and has}
        alone |= tenant == DEFAULT_TENANT and held.keys() <= {tenant}
        growth, capacity = self._growth(upload_id, size_bytes), self._files.total_bytes - self._held[EVERYONE]
        return has_room(held, tenant, growth, capacity, alone=alone)

    def _refusal(self, tenant: str, upload_id: str, size_bytes: int) -> LoraLimit | LoraStoreFull:
        more, own, everyones = self._growth(upload_id, size_bytes), self._held[tenant], self._held.total()
        received = f"{more} bytes beside {own} of this tenant's and {everyones} of all"
        accepted = f"{self._files.total_bytes} bytes, shared by all tenants; deleted LoRAs count until their files go"
        if self._fits(tenant, upload_id, size_bytes, alone=True):
            message = "There is no room for another LoRA of this tenant."
            return LoraLimit(message, received=received, accepted=accepted)
        return LoraStoreFull(received=received, accepted=accepted)


def names(record: LoraRecord) -> list[str]:
    """The names of the files that a record needs."""
    files = [record.source, record.canonical and record.canonical.file]
    return [record.lora_id, *(file.sha256 for file in files if file)]
