"""A blob store on a Redis-protocol server (Redis, Valkey): append-only, no eviction, a time to live on every key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from giornata.blobs.protocol import refer, verify
from giornata.wire.errors import BlobStoreFull, ServiceUnavailable
from giornata.wire.jobs import BlobRef

PREFIX = "giornata:"


class RedisBlobs:
    """Blobs as plain string keys. Make it with :meth:`open`."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, *, timeout_s: float = 10) -> AsyncIterator[RedisBlobs]:
        """Connect to ``redis://``, ``rediss://`` or ``unix://``.

        A command whose connection fails, or whose server still reads its file, is tried again for about seven
        seconds, in which a server can restart; one that is not answered within `timeout_s` is not.

        Raises:
            ServiceUnavailable: no server answers.
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
        ref, _ = await asyncio.gather(refer(key, data), self._set(key, data, ttl_s))
        return ref

    async def get(self, ref: BlobRef) -> bytes:
        try:
            data = await self._client.get(PREFIX + ref.key)
        except redis.exceptions.RedisError as error:
            raise _unavailable() from error
        return await verify(ref, data if isinstance(data, bytes) else None)

    async def has(self, ref: BlobRef) -> bool:
        try:
            return bool(await self._client.exists(PREFIX + ref.key))
        except redis.exceptions.RedisError as error:
            raise _unavailable() from error

    async def renew(self, ref: BlobRef, ttl_s: int) -> bool:
        try:
            return bool(await self._client.expire(PREFIX + ref.key, ttl_s))
        except redis.exceptions.RedisError as error:
            raise _unavailable() from error

    async def delete(self, *refs: BlobRef) -> None:
        if not refs:
            return
        try:
            await self._client.delete(*(PREFIX + ref.key for ref in refs))
        except redis.exceptions.RedisError as error:
            raise _unavailable() from error

    async def ping(self) -> None:
        try:
            await self._client.ping()
        except redis.exceptions.RedisError as error:
            raise _unavailable() from error

    async def _set(self, key: str, data: bytes, ttl_s: int) -> None:
        try:
            await self._client.set(PREFIX + key, data, ex=ttl_s)
        except redis.exceptions.OutOfMemoryError as error:
            raise BlobStoreFull(received=f"{len(data)} bytes", retry_after_s=10) from error
        except redis.exceptions.RedisError as error:
            raise _unavailable() from error


def _unavailable() -> ServiceUnavailable:
    return ServiceUnavailable("The blob store does not answer; is GIORNATA_REDIS_URL right?", retry_after_s=2)
