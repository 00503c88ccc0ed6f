"""A blob store whose transfers are spans. Keys are not told: they name tenants."""

from __future__ import annotations

from giornata.blobs.store import BlobStore
from giornata.seeing.spans import span
from giornata.seeing.told import TraceSpanKind
from giornata.wire.jobs import BlobRef


class TracedBlobs(BlobStore):
    """`store`, told of; it stands in front only where tracing is on."""

    def __init__(self, store: BlobStore) -> None:
        self._store, self.pool = store, store.pool

    async def write(self, key: str, data: bytes, ttl_s: int) -> None:
        with span("blob write", TraceSpanKind.ASKS, bytes=len(data)):
            await self._store.write(key, data, ttl_s)

    async def put(self, key: str, data: bytes, ttl_s: int) -> BlobRef:
        with span("blob write", TraceSpanKind.ASKS, bytes=len(data)):
            return await self._store.put(key, data, ttl_s)

    async def get(self, ref: BlobRef) -> bytes:
        with span("blob read", TraceSpanKind.ASKS, bytes=ref.size_bytes):
            return await self._store.get(ref)

    async def has(self, ref: BlobRef) -> bool:
        return await self._store.has(ref)

    async def renew(self, ref: BlobRef, ttl_s: int) -> bool:
        return await self._store.renew(ref, ttl_s)

    async def delete(self, *refs: BlobRef) -> None:
        with span("blob delete", TraceSpanKind.ASKS):
            await self._store.delete(*refs)

    async def ping(self) -> None:
        await self._store.ping()
