"""A blob store in this process's memory: for tests and for tools that need no server."""

from __future__ import annotations

import time
from collections.abc import Callable

from giornata.blobs.protocol import refer, verify
from giornata.wire.errors import BlobStoreFull
from giornata.wire.jobs import BlobRef


class MemoryBlobs:
    """A dictionary with a capacity and expiry."""

    def __init__(self, capacity_bytes: int = 1 << 30, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity_bytes = capacity_bytes
        self._clock = clock
        self._blobs: dict[str, tuple[bytes, float]] = {}

    async def put(self, key: str, data: bytes, ttl_s: int) -> BlobRef:
        self._expire()
        used = sum(len(blob) for name, (blob, _) in self._blobs.items() if name != key)
        if used + len(data) > self._capacity_bytes:
            raise BlobStoreFull(
                received=f"{len(data)} bytes", accepted=f"{self._capacity_bytes - used} bytes now"
            )
        self._blobs[key] = (bytes(data), self._clock() + ttl_s)
        return await refer(key, data)

    async def get(self, ref: BlobRef) -> bytes:
        self._expire()
        blob = self._blobs.get(ref.key)
        return await verify(ref, blob[0] if blob else None)

    async def has(self, ref: BlobRef) -> bool:
        self._expire()
        return ref.key in self._blobs

    async def renew(self, ref: BlobRef, ttl_s: int) -> bool:
        self._expire()
        blob = self._blobs.get(ref.key)
        if blob is not None:
            self._blobs[ref.key] = (blob[0], self._clock() + ttl_s)
        return blob is not None

    async def delete(self, *refs: BlobRef) -> None:
        for ref in refs:
            self._blobs.pop(ref.key, None)

    async def ping(self) -> None:
        """Memory always answers."""

    def _expire(self) -> None:
        now = self._clock()
        self._blobs = {key: value for key, value in self._blobs.items() if value[1] > now}
