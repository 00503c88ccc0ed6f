"""Blob stores: images, latents and embeddings travel as claim checks to one of these."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from giornata.blobs.memory import MemoryBlobs
from giornata.blobs.redis import RedisBlobs
from giornata.blobs.s3 import S3Blobs
from giornata.blobs.store import BlobStore, intermediate, refer

__all__ = ["BlobStore", "MemoryBlobs", "RedisBlobs", "S3Blobs", "intermediate", "open_blobs", "refer"]


@asynccontextmanager
async def open_blobs(url: str) -> AsyncIterator[BlobStore]:
    """The store that ``GIORNATA_BLOBS_URL`` names, open while inside; ServiceUnavailable if it does not answer.

    ``s3://`` is an S3-compatible object store; ``redis://``, ``rediss://`` and ``unix://`` are Redis-protocol servers.
    """
    async with S3Blobs.open(url) if url.startswith("s3://") else RedisBlobs.open(url) as store:
        yield store
