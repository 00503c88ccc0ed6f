"""A blob store, and a client that asks instances of prepost."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from giornata.blobs import RedisBlobs
from giornata.bus import bus
from giornata.bus.bus import Bus


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def blobs(redis_url: str) -> AsyncIterator[RedisBlobs]:
    async with RedisBlobs.open(redis_url) as store:
        yield store


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def caller(nats_url: str) -> AsyncIterator[Bus]:
    async with bus.connect(nats_url, "test") as connected:
        yield connected
