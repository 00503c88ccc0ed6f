"""A blob store on a Redis-protocol server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final

import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from giornata.blobs.store import UNANSWERED, BlobStore, verify
from giornata.wire.errors import BlobStoreFull, ServiceUnavailable, StorageFull
from giornata.wire.jobs import BlobRef

PREFIX: Final = "giornata:"
"""Before every key on the server."""
CONNECTIONS: Final = 16
"""Most of one process. Others wait: a server that stalls would else be met by a connection for every waiting command,
and connections stay."""


class RedisBlobs(BlobStore):
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
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(ExponentialBackoff(cap=1, base=0.05), 10, (redis.exceptions.ConnectionError,)),
        )
        client = redis.asyncio.Redis.from_pool(pool)
        store = cls(client)
        try:
            await store.ping()
            yield store
        finally:
            await client.aclose()

    async def write(self, key: str, data: bytes, ttl_s: int) -> None:
        with _answering(data):
            await self._client.set(PREFIX + key, data, ex=ttl_s)

    async def get(self, ref: BlobRef) -> bytes:
        with _answering():
            data = await self._client.get(PREFIX + ref.key)
        return await verify(ref, data if isinstance(data, bytes) else None)

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
        with suppress(StorageFull), _answering():  # it answers, and can be read
            await self._client.ping()


@contextmanager
def _answering(stored: bytes = b"") -> Iterator[None]:
    """Errors of the client as errors of the tree."""
    try:
        yield
    except redis.exceptions.OutOfMemoryError as error:
        raise BlobStoreFull(received=f"{len(stored)} bytes", retry_after_s=10) from error
    except redis.exceptions.ResponseError as error:
        if str(error).startswith("MISCONF"):  # it writes again by itself once there is room
            raise StorageFull(
                "The blob store cannot write to its disk, which is probably full.",
                received=error,
                retry_after_s=10,
            ) from error
        raise ServiceUnavailable(
            "The blob store refuses a command.", received=error, retry_after_s=2
        ) from error
    except redis.exceptions.RedisError as error:
        raise ServiceUnavailable(UNANSWERED, retry_after_s=2) from error
