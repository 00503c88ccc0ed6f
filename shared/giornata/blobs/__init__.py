"""Blob stores: images, latents and embeddings travel as claim checks to one of these."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from giornata.blobs.store import BlobStore, MemoryBlobs, intermediate, refer

if TYPE_CHECKING:
    from giornata.blobs.redis import RedisBlobs
    from giornata.blobs.s3 import S3Blobs

__all__ = [
    "BlobStore",
    "MemoryBlobs",
    "RedisBlobs",
    "S3Blobs",
    "intermediate",
    "open_blobs",
    "refer",
]

_CLIENTS: Final = {"RedisBlobs": "giornata.blobs.redis", "S3Blobs": "giornata.blobs.s3"}
"""Where the stores are whose clients are only imported when one is opened, or asked for by name."""


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
