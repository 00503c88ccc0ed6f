"""Claim checks that came with a request: blobs that its tenant has stored."""

from __future__ import annotations

from giornata.blobs import BlobStore
from giornata.wire.errors import InvalidField
from giornata.wire.jobs import BlobRef


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
