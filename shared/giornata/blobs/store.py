"""What every blob store does, and how claim checks are made and verified."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Final, Protocol

from giornata.wire.errors import InputLost, IntermediateLost
from giornata.wire.jobs import BlobRef
from giornata.wire.values import Intermediate

HASH_INLINE_BYTES: Final = 1 << 20
"""Larger data is hashed in a thread; up to this size hashing takes less than a millisecond, and the hop more."""
UNANSWERED: Final = "The blob store does not answer; is GIORNATA_BLOBS_URL right?"


class BlobStore(Protocol):
    """Keeps bytes under a key for a time. A claim check names the key, the size and the sha-256."""

    async def put(self, key: str, data: bytes, ttl_s: int) -> BlobRef:
        """Store `data` for `ttl_s` seconds, in place of what the key had.

        BlobStoreFull if there is no room: nothing is evicted.
        """

    async def get(self, ref: BlobRef) -> bytes:
        """The bytes that a claim check was made for; InputLost if they are gone, or others lie there."""

    async def has(self, ref: BlobRef) -> bool:
        """Whether the bytes are still there; they are not read."""

    async def renew(self, ref: BlobRef, ttl_s: int) -> bool:
        """Keep the bytes for `ttl_s` seconds from now, longer or shorter than before; False if they are gone."""

    async def delete(self, *refs: BlobRef) -> None:
        """Forget blobs; a blob that is not there is no error."""

    async def ping(self) -> None:
        """Raise :class:`~giornata.wire.errors.ServiceUnavailable` unless the store answers."""


async def refer(key: str, data: bytes) -> BlobRef:
    """The claim check of `data` under `key`."""
    return BlobRef(key=key, size_bytes=len(data), sha256=await _sha256(data))


async def verify(ref: BlobRef, data: bytes | None) -> bytes:
    """`data`, which was found under the key of `ref`; InputLost if there is none, or if it is other data."""
    if data is None:
        raise InputLost(received=ref.key)
    if len(data) != ref.size_bytes or await _sha256(data) != ref.sha256:
        raise InputLost("A blob is not the one that was stored.", received=ref.key)
    return data


async def intermediate(blobs: BlobStore, ref: BlobRef, name: Intermediate) -> bytes:
    """The bytes that a stage left for this one; IntermediateLost names them if they are gone."""
    try:
        return await blobs.get(ref)
    except InputLost as error:
        message = f"An intermediate result, the {name}, is no longer in the blob store."
        raise IntermediateLost(message, field=name, received=ref.key) from error


async def _sha256(data: bytes) -> str:
    if len(data) <= HASH_INLINE_BYTES:
        return hashlib.sha256(data).hexdigest()
    return await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
