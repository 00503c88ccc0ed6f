"""What every blob store does, and how claim checks are made and verified."""

from __future__ import annotations

import asyncio
import hashlib
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol, TypeVar

from blake3 import blake3

from giornata import retries
from giornata.wire.errors import InputLost, IntermediateLost
from giornata.wire.jobs import BlobRef
from giornata.wire.values import Intermediate

INLINE_BYTES: Final = 5 << 18
"""Larger data is hashed and copied in a thread; up to this size that takes less than a millisecond, and the hop more.
Latents of 1024x1024 in float32, 1 MiB and a header, are below it."""
ARRIVAL_S: Final = 2.0
"""How long a reader elsewhere waits for a blob that was handed over; its way to the store takes milliseconds."""
UNANSWERED: Final = "The blob store does not answer; is GIORNATA_BLOBS_URL right?"

T = TypeVar("T")


class BlobStore(Protocol):
    """Keeps bytes under a key for a time. A claim check names the key, the size and a hash."""

    @abstractmethod
    async def write(self, key: str, data: bytes, ttl_s: int) -> None:
        """Store `data` for `ttl_s` seconds, in place of what the key had.

        BlobStoreFull if there is no room: nothing is evicted. StorageFull if the store's disk is full.
        """

    async def put(self, key: str, data: bytes, ttl_s: int) -> BlobRef:
        """:meth:`write`, and the claim check."""
        ref, _ = await asyncio.gather(refer(key, data), self.write(key, data, ttl_s))
        return ref

    async def hand_over(self, key: str, data: bytes, ttl_s: int) -> BlobRef:
        """As :meth:`put`, for what the next stage reads by :func:`intermediate`, maybe before the store has it."""
        return await self.put(key, data, ttl_s)

    @abstractmethod
    async def get(self, ref: BlobRef) -> bytes:
        """The bytes that a claim check was made for; InputLost if they are gone, or others lie there."""

    @abstractmethod
    async def has(self, ref: BlobRef) -> bool:
        """Whether the bytes are still there; they are not read."""

    @abstractmethod
    async def renew(self, ref: BlobRef, ttl_s: int) -> bool:
        """Keep the bytes for `ttl_s` seconds from now, longer or shorter than before; False if they are gone."""

    @abstractmethod
    async def delete(self, *refs: BlobRef) -> None:
        """Forget blobs; a blob that is not there is no error."""

    @abstractmethod
    async def ping(self) -> None:
        """Raise :class:`~giornata.wire.errors.ServiceUnavailable` unless the store answers."""


async def refer(key: str, data: bytes) -> BlobRef:
    """The claim check of `data` under `key`."""
    return BlobRef(key=key, size_bytes=len(data), sha256=await _hashed(_sha256, data))


async def verify(ref: BlobRef, data: bytes | None) -> bytes:
    """`data`, which was found under the key of `ref`; InputLost if there is none, or if it is other data."""
    if data is None:
        raise InputLost(received=ref.key)
    if not await matches(ref, data):
        raise InputLost("A blob is not the one that was stored.", received=ref.key)
    return data


async def matches(ref: BlobRef, data: bytes) -> bool:
    """Whether `ref` is the claim check of `data`."""
    if len(data) != ref.size_bytes:
        return False
    if ref.blake3 is not None:
        return await _hashed(blake3_of, data) == ref.blake3
    return await _hashed(_sha256, data) == ref.sha256


async def intermediate(blobs: BlobStore, ref: BlobRef, name: Intermediate) -> bytes:
    """The bytes that a stage left for this one; IntermediateLost names them if they are gone.

    What was handed over is waited for: on another host, its claim check may be faster than its way to the store.
    """
    read = partial(blobs.get, ref)
    try:
        if ref.blake3 is None:
            return await read()
        return await retries.persistently(partial(retries.arriving, InputLost, ARRIVAL_S), read)
    except InputLost as error:
        message = f"An intermediate result, the {name}, is no longer in the blob store."
        raise IntermediateLost(message, field=name, received=ref.key) from error


async def either(small: bool, work: Callable[[], T]) -> T:  # noqa: FBT001 - read as a condition
    """The result of `work`, done here where that is `small`, else in a thread."""
    return work() if small else await asyncio.to_thread(work)


def blake3_of(data: bytes) -> str:
    """BLAKE3 of `data`, hex: as hard to forge as sha-256, and several times as fast."""
    return blake3(data).hexdigest()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def _hashed(function: Callable[[bytes], str], data: bytes) -> str:
    return await either(len(data) <= INLINE_BYTES, partial(function, data))
