"""Blob stores: images, latents and embeddings travel as claim checks to one of these."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from giornata.wire.errors import BlobStoreFull, InputLost, ServiceUnavailable
from giornata.wire.jobs import BlobRef

HASH_INLINE_BYTES = 1 << 20
"""Larger data is hashed in a thread; up to this size hashing takes less than a millisecond, and the hop more."""
PREFIX = "giornata:"


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


async def _verify(ref: BlobRef, data: bytes | None) -> bytes:
    if data is None:
        raise InputLost(received=ref.key)
    if len(data) != ref.size_bytes or await _sha256(data) != ref.sha256:
        raise InputLost("A blob is not the one that was stored.", received=ref.key)
    return data


async def _sha256(data: bytes) -> str:
    if len(data) <= HASH_INLINE_BYTES:
        return hashlib.sha256(data).hexdigest()
    return await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())


class MemoryBlobs:
    """A dictionary with a capacity and expiry: for tests and for tools that need no server."""

    def __init__(self, capacity_bytes: int = 1 << 30) -> None:
        self._capacity_bytes = capacity_bytes
        self._blobs: dict[str, tuple[bytes, float]] = {}

    async def put(self, key: str, data: bytes, ttl_s: int) -> BlobRef:
        self._expire()
        used = sum(len(blob) for name, (blob, _) in self._blobs.items() if name != key)
        if used + len(data) > self._capacity_bytes:
            raise BlobStoreFull(
                received=f"{len(data)} bytes", accepted=f"{self._capacity_bytes - used} bytes now"
            )
        self._blobs[key] = (bytes(data), time.monotonic() + ttl_s)
        return await refer(key, data)

    async def get(self, ref: BlobRef) -> bytes:
        self._expire()
        data, _ = self._blobs.get(ref.key, (None, 0))
        return await _verify(ref, data)

    async def has(self, ref: BlobRef) -> bool:
        self._expire()
        return ref.key in self._blobs

    async def renew(self, ref: BlobRef, ttl_s: int) -> bool:
        found = await self.has(ref)
        if found:
            self._blobs[ref.key] = (self._blobs[ref.key][0], time.monotonic() + ttl_s)
        return found

    async def delete(self, *refs: BlobRef) -> None:
        for ref in refs:
            self._blobs.pop(ref.key, None)

    async def ping(self) -> None:
        """Memory always answers."""

    def _expire(self) -> None:
        now = time.monotonic()
        self._blobs = {key: value for key, value in self._blobs.items() if value[1] > now}


class RedisBlobs:
    """Plain string keys on a Redis-protocol server that evicts nothing. Make it with :meth:`open`."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, *, timeout_s: float = 10) -> AsyncIterator[RedisBlobs]:
        """Connect to ``redis://``, ``rediss://`` or ``unix://``; ServiceUnavailable if no server answers.

        A command is tried again for about seven seconds, long enough for a server to restart, if its connection fails
        or the server still reads its file. A command that is not answered within `timeout_s` is not tried again.
        """
        client = redis.asyncio.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(ExponentialBackoff(cap=1, base=0.05), 10, (redis.exceptions.ConnectionError,)),
        )
        store = cls(client)
        try:
            await store.ping()
            yield store
        finally:
            await client.aclose()

    async def put(self, key: str, data: bytes, ttl_s: int) -> BlobRef:
        with _answering(data):
            ref, _ = await asyncio.gather(refer(key, data), self._client.set(PREFIX + key, data, ex=ttl_s))
        return ref

    async def get(self, ref: BlobRef) -> bytes:
        with _answering():
            data = await self._client.get(PREFIX + ref.key)
        return await _verify(ref, data if isinstance(data, bytes) else None)

    async def has(self, ref: BlobRef) -> bool:
        with _answering():
            return bool(await self._client.exists(PREFIX + ref.key))

    async def renew(self, ref: BlobRef, ttl_s: int) -> bool:
        with _answering():
            return bool(await self._client.expire(PREFIX + ref.key, ttl_s))

    async def delete(self, *refs: BlobRef) -> None:
        if refs:
            with _answering():
                await self._client.delete(*(PREFIX + ref.key for ref in refs))

    async def ping(self) -> None:
        with _answering():
            await self._client.ping()


@contextmanager
def _answering(stored: bytes = b"") -> Iterator[None]:
    """Errors of the client as errors of the tree."""
    try:
        yield
    except redis.exceptions.OutOfMemoryError as error:
        raise BlobStoreFull(received=f"{len(stored)} bytes", retry_after_s=10) from error
    except redis.exceptions.RedisError as error:
        raise ServiceUnavailable(
            "The blob store does not answer; is GIORNATA_REDIS_URL right?", retry_after_s=2
        ) from error
