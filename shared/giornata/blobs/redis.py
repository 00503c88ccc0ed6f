"""A blob store on a Redis-protocol server."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final

import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from giornata.api_keys import DEFAULT_TENANT
from giornata.blobs import UNANSWERED, BlobStore
from giornata.shares import KEPT, SharedPool, TenantAllocation
from giornata.wire.errors import BlobStoreFull, ServiceUnavailable, StorageFull
from giornata.wire.jobs import BlobRef

PREFIX: Final = "giornata:"
"""Before every key on the server."""
CONNECTIONS: Final = 16
"""Most of one process. Others wait: a server that stalls would else be met by a connection for every waiting command,
and connections stay."""
MEASURED_S: Final = 2.0
"""What tenants have is measured no more often; what other processes write meanwhile is not seen."""
RESTS: Final = 20
"""And a measurement is followed by so many times what it took: several processes walk all keys of one server."""
LONGEST_REST_S: Final = 30.0
"""But by no more than this: an old measurement refuses tenants that have room."""
_MEASURE: Final = """
local page, held = redis.call('SCAN', ARGV[1], 'MATCH', ARGV[2] .. '*/*', 'COUNT', 1000), {}
for _, key in ipairs(page[2]) do
  local tenant = key:match(':job_' .. ('[%w_-]'):rep(24) .. '/([^/]+)/') or key:match(':([^/]+)')
  held[tenant] = (held[tenant] or 0) + redis.call('STRLEN', key)
end
return {page[1], cjson.encode(held)}"""


class RedisBlobs(BlobStore):
    """Plain string keys on a Redis-protocol server that evicts nothing. Make it with :meth:`open`."""

    def __init__(self, client: redis.asyncio.Redis, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._clock, self._due_s = client, clock, -math.inf
        self._pool = pool = SharedPool(sys.maxsize, lambda: pool.held(DEFAULT_TENANT) == pool.used)
        self.pool = pool

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

    async def store(self, key: str, data: bytes, ttl_s: int) -> None:
        with _answering(data):
            # a tenant is first in a key, and second in one of what a job's stages make
            if found := re.match(r"(?:(job_)[\w-]{24}/)?([^/]+)/", key):
                await self._take(found[2], len(data), KEPT / 2 if found[1] else KEPT)
            await self._client.set(PREFIX + key, data, ex=ttl_s)

    async def read(self, key: str) -> bytes | None:
        with _answering():
            data = await self._client.get(PREFIX + key)
        return data if isinstance(data, bytes) else None

    async def has(self, ref: BlobRef) -> bool:
        with _answering():
            return bool(await self._client.exists(PREFIX + ref.key))

    async def renew(self, ref: BlobRef, ttl_s: int) -> bool:
        with _answering():
            return bool(await self._client.expire(PREFIX + ref.key, ttl_s))

    async def remove(self, keys: set[str]) -> None:
        if keys:
            with _answering():
                await self._client.delete(*(PREFIX + key for key in keys))

    async def ping(self) -> None:
        with suppress(StorageFull), _answering():  # it answers, and can be read
            await self._client.ping()

    async def _take(self, tenant: str, size_bytes: int, kept: float) -> None:
        """Count bytes of a tenant; BlobStoreFull where the one that has most would leave less than `kept` to others."""
        if (began := self._clock()) >= self._due_s:
            self._due_s, rest_s = math.inf, MEASURED_S  # one at a time
            try:
                await self._measure()
                rest_s = max(rest_s, min(RESTS * (self._clock() - began), LONGEST_REST_S))
            except redis.exceptions.ResponseError:  # a server that tells nothing has no shares
                self._pool.capacity = sys.maxsize
            finally:
                self._due_s = self._clock() + rest_s
        pool, asking = self._pool, TenantAllocation(tenant, self._pool.weight_of(tenant))
        if not pool.fits(asking, max(1, size_bytes), 0.0, kept):
            pool.outcomes[tenant, "refused"] += 1
            received = f"{size_bytes} bytes beside {pool.held(tenant)} of {tenant}, {pool.used} of all"
            accepted = f"{pool.capacity} bytes, shared by all tenants"
            message = "The blob store has no room for more of this tenant; try again later."
            raise BlobStoreFull(message, received=received, accepted=accepted, retry_after_s=10)
        pool.count(asking, size_bytes, 0.0)

    async def _measure(self) -> None:
        """Measure what tenants have of a store that is nearly full. Its overhead counts for each in proportion."""
        held, cursor = Counter[str](), b""
        memory = await self._client.info("memory")
        used, self._pool.capacity = memory["used_memory"], memory.get("maxmemory") or sys.maxsize
        while used > (1 - KEPT) * self._pool.capacity and cursor != b"0":
            cursor, page = await self._client.eval(_MEASURE, 0, cursor or b"0", PREFIX)
            held.update(json.loads(page))
        held, whole = held or Counter({"": used}), held.total() or used
        self._pool.measured({tenant: used * part // whole for tenant, part in held.items()})


@contextmanager
def _answering(stored: bytes = b"") -> Iterator[None]:
    """Errors of the client as errors of the tree."""
    try:
        yield
    except redis.exceptions.OutOfMemoryError as error:
        raise BlobStoreFull(received=f"{len(stored)} bytes", retry_after_s=10) from error
    except redis.exceptions.ResponseError as error:
        if str(error).startswith("MISCONF"):  # it writes again by itself once there is room
            message = "The blob store cannot write to its disk, which is probably full."
            raise StorageFull(message, received=error, retry_after_s=10) from error
        raise ServiceUnavailable(
            "The blob store refuses a command.", received=error, retry_after_s=2
        ) from error
    except redis.exceptions.RedisError as error:
        raise ServiceUnavailable(UNANSWERED, retry_after_s=2) from error
