"""A blob store in this process's memory, for tests that need no server."""

from __future__ import annotations

import time

from giornata.blobs import BlobStore
from giornata.wire.errors import BlobStoreFull
from giornata.wire.jobs import BlobRef


class MemoryBlobs(BlobStore):
    """A dictionary with a capacity and expiry."""

    def __init__(self, capacity_bytes: int = 1 << 30) -> None:
        self._capacity_bytes = capacity_bytes
        self._blobs: dict[str, tuple[bytes, float]] = {}

    async def store(self, key: str, data: bytes, ttl_s: int) -> None:
        self._expire()
        used = sum(len(blob) for name, (blob, _) in self._blobs.items() if name != key)
        if used + len(data) > self._capacity_bytes:
            raise BlobStoreFull(
                received=f"{len(data)} bytes", accepted=f"{self._capacity_bytes - used} bytes now"
            )
        self._blobs[key] = (bytes(data), time.monotonic() + ttl_s)

    async def read(self, key: str) -> bytes | None:
        self._expire()
        return self._blobs.get(key, (None, 0))[0]

    async def has(self, ref: BlobRef) -> bool:
        self._expire()
        return ref.key in self._blobs

    async def renew(self, ref: BlobRef, ttl_s: int) -> bool:
        found = await self.has(ref)
        if found:
            self._blobs[ref.key] = (self._blobs[ref.key][0], time.monotonic() + ttl_s)
        return found

    async def remove(self, keys: set[str]) -> None:
        for key in keys:
            self._blobs.pop(key, None)

    async def ping(self) -> None:
        """Memory always answers."""

    def _expire(self) -> None:
        now = time.monotonic()
        self._blobs = {key: value for key, value in self._blobs.items() if value[1] > now}
