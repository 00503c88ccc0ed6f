"""Blobs of a request: claim checks that came with it, and what no job will read."""

from __future__ import annotations

import structlog

from giornata.blobs import BlobStore
from giornata.wire.errors import InvalidField
from giornata.wire.jobs import BlobRef

log = structlog.get_logger(__name__)


async def check_stored(blobs: BlobStore, name: str, picture: bytes | BlobRef) -> None:
    """Raise InvalidField where `picture`, which came under `name`, is a claim check that leads to no blob."""
    if isinstance(picture, BlobRef) and not await blobs.has(picture):
        raise InvalidField(
            "There is no such blob.", field=name, received=picture.key, accepted="a stored blob"
        )


async def stored(blobs: BlobStore, key: str, picture: bytes | BlobRef, ttl_s: int) -> BlobRef:
    """Where `picture` lies: what came as a file is kept under `key` for `ttl_s`, another blob stays where it is."""
    if isinstance(picture, BlobRef):
        # nothing that its caller adds is kept, and pictures are known by one kind of hash
        return BlobRef(key=picture.key, size_bytes=picture.size_bytes, sha256=picture.sha256)
    return await blobs.put(key, picture, ttl_s)


async def forget(blobs: BlobStore, *refs: BlobRef) -> None:
    """Delete `refs`. It raises nothing: what fails is logged."""
    try:
        await blobs.delete(*refs)
    except Exception:  # the task's edge: logged; the blobs expire
        log.exception("forget_failed", keys=[ref.key for ref in refs])
