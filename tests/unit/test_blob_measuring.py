"""How often a blob store asks a Redis-protocol server what tenants have of it, on a clock of its own."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import redis.exceptions

from giornata.blobs import RedisBlobs
from giornata.blobs.redis import LONGEST_REST_S, MEASURED_S, RESTS


class NearlyFull:
    """A server that is 9/10 full, and tells in `pages` calls, of `page_s` each, what tenants have."""

    def __init__(self, pages: int = 1, page_s: float = 0.0) -> None:
        self.now, self.pages, self.page_s, self.walks = 0.0, pages, page_s, 0
        self.refuses = False
        self.walking, self.answers = asyncio.Event(), asyncio.Event()
        self.answers.set()

    def clock(self) -> float:
        return self.now

    async def info(self, _: str) -> dict[str, int]:
        return {"used_memory": 900_000, "maxmemory": 1_000_000}

    async def eval(self, _script: str, _keys: int, cursor: bytes, _prefix: str) -> list[bytes]:
        self.walks += cursor == b"0"
        self.walking.set()
        self.now += self.page_s
        assert self.walks == 1 or self.answers.is_set(), "two walk at a time"
        await self.answers.wait()
        if self.refuses:
            raise redis.exceptions.ResponseError("NOPERM")
        following = (int(cursor) + 1) % self.pages
        return [str(following).encode(), json.dumps({"alice": 9, "bob": 1}).encode()]

    async def set(self, *_: Any, **__: Any) -> None:
        """Takes everything."""


def store(server: NearlyFull) -> RedisBlobs:
    client: Any = server
    return RedisBlobs(client, server.clock)


@pytest.mark.parametrize(("pages", "page_s"), [(200, 0.01), (50, 0.01), (1, 0.0)])
async def test_a_measurement_rests_for_many_times_what_it_took(pages: int, page_s: float) -> None:
    server = NearlyFull(pages, page_s)
    blobs, rest_s = store(server), max(MEASURED_S, min(RESTS * pages * page_s, LONGEST_REST_S))
    for expected in (1, 2):
        await blobs.write("bob/upload/0", b"x", 60)
        assert server.walks == expected
        server.now += 0.99 * rest_s
        await blobs.write("bob/upload/1", b"x", 60)
        assert server.walks == expected, "a write that comes within the rest measures nothing"
        server.now += 0.02 * rest_s


async def test_a_write_beside_a_measurement_makes_no_second_one() -> None:
    server = NearlyFull()
    blobs = store(server)
    server.answers.clear()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(blobs.write("bob/upload/0", b"x", 60))
        await server.walking.wait()
        server.now += 1000 * MEASURED_S
        await blobs.write("bob/upload/0", b"x", 60)
        server.answers.set()
    assert server.walks == 1


async def test_a_measurement_that_failed_is_tried_again_as_soon_as_a_short_one() -> None:
    server = NearlyFull(page_s=1000.0)
    blobs, server.refuses = store(server), True
    await blobs.write("bob/upload/0", b"x", 60)
    server.now += MEASURED_S
    await blobs.write("bob/upload/1", b"x", 60)
    assert server.walks == 2
