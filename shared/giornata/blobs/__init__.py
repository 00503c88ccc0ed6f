"""Blob stores: images, latents and embeddings travel as claim checks to one of these.

What each of them does, and how claim checks are made and verified.
"""

from __future__ import annotations

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from giornata.shares import SharedPool
from giornata.tracing import TraceSpanKind, span
from giornata.wire.errors import InputLost, IntermediateLost
from giornata.wire.jobs import BlobRef
from giornata.wire.values import Intermediate

if TYPE_CHECKING:
    from giornata.blobs.redis import RedisBlobs
    from giornata.blobs.s3 import S3Blobs

__all__ = [
    "BlobStore",
    "RedisBlobs",
    "S3Blobs",
    "intermediate",
    "open_blobs",
    "refer",
]

_CLIENTS: Final = {"RedisBlobs": "giornata.blobs.redis", "S3Blobs": "giornata.blobs.s3"}
"""Where the stores are whose clients are only imported when one is opened, or asked for by name."""
INLINE_BYTES: Final = 5 << 18
"""Larger data is hashed in a thread; up to this size that takes less than a millisecond, and the hop more.
Latents of 1024x1024 in float32, 1 MiB and a header, are below it."""
UNANSWERED: Final = "The blob store does not answer; is GIORNATA_BLOBS_URL right?"


class BlobStore(ABC):
    """Keeps bytes under a key for a time. A claim check names the key, the size and a hash.

    Transfers are spans, which do not tell keys: they name tenants.
    """

    pool: SharedPool | None = None
    """Bytes of tenants, where the store tells its limit."""

    async def write(self, key: str, data: bytes, ttl_s: int) -> None:
        """Store `data` for `ttl_s` seconds, in place of what the key had.

        BlobStoreFull if there is no room for the key's tenant; nothing is evicted. StorageFull if its disk is full.
        """
        with span("blob write", TraceSpanKind.ASKS, bytes=len(data)):
            await self.store(key, data, ttl_s)

    async def put(self, key: str, data: bytes, ttl_s: int) -> BlobRef:
        """:meth:`write`, and the claim check."""
        ref, _ = await asyncio.gather(refer(key, data), self.write(key, data, ttl_s))
        return ref

    async def get(self, ref: BlobRef) -> bytes:
        """The bytes that a claim check was made for; InputLost if they are gone, or others lie there."""
        with span("blob read", TraceSpanKind.ASKS, bytes=ref.size_bytes):
            data = await self.read(ref.key)
            if data is None:
                raise InputLost(received=ref.key)
            if len(data) != ref.size_bytes or await _sha256(data) != ref.sha256:
                raise InputLost("A blob is not the one that was stored.", received=ref.key)
            return data

    async def delete(self, *refs: BlobRef) -> None:
        """Forget blobs; a blob that is not there is no error."""
        with span("blob delete", TraceSpanKind.ASKS):
            await self.remove({ref.key for ref in refs})

    @abstractmethod
    async def store(self, key: str, data: bytes, ttl_s: int) -> None:
        """See :meth:`write`."""

    @abstractmethod
    async def read(self, key: str) -> bytes | None:
        """What lies under a key; None for nothing."""

    @abstractmethod
    async def remove(self, keys: set[str]) -> None:
        """See :meth:`delete`."""

    @abstractmethod
    async def has(self, ref: BlobRef) -> bool:
        """Return whether the bytes are still there; they are not read."""

    @abstractmethod
    async def renew(self, ref: BlobRef, ttl_s: int) -> bool:
        """Keep the bytes for `ttl_s` seconds from now, longer or shorter than before; False if they are gone."""

    @abstractmethod
    async def ping(self) -> None:
        """Raise :class:`~giornata.wire.errors.ServiceUnavailable` unless the store answers."""


async def refer(key: str, data: bytes) -> BlobRef:
    """The claim check of `data` under `key`."""
    return BlobRef(key=key, size_bytes=len(data), sha256=await _sha256(data))


async def intermediate(blobs: BlobStore, ref: BlobRef, name: Intermediate) -> bytes:
    """The bytes that a stage left for this one; IntermediateLost names them if they are gone."""
    try:
        return await blobs.get(ref)
    except InputLost as error:
        message = f"An intermediate result, the {name}, is no longer in the blob store."
        raise IntermediateLost(message, field=name, received=ref.key) from error


async def _sha256(data: bytes) -> str:
    def digest() -> str:
        return hashlib.sha256(data).hexdigest()

    return digest() if len(data) <= INLINE_BYTES else await asyncio.to_thread(digest)


def __getattr__(name: str) -> Any:
    if name not in _CLIENTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_CLIENTS[name]), name)


@asynccontextmanager
async def open_blobs(url: str) -> AsyncIterator[BlobStore]:
    """The store that ``GIORNATA_BLOBS_URL`` names, open while inside; ServiceUnavailable if it does not answer.

    ``s3://`` is an S3-compatible object store; ``redis://``, ``rediss://`` and ``unix://`` are Redis-protocol servers.
    """
    kind: type[S3Blobs | RedisBlobs] = __getattr__("S3Blobs" if url.startswith("s3://") else "RedisBlobs")
    async with kind.open(url) as store:
        yield store
