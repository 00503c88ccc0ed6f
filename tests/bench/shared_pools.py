"""Each shared pool of the gateway held by one tenant: what another one gets, beside what it gets alone.

A gateway in front of a scripted router, with real NATS and Valkey. Alice holds the pool and takes again whatever she is
refused; bob asks, one request after the other. A pool is shared as promised where he keeps half of his rate.

Writes ``out/bench/shared_pools.json``.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import uvloop

from tests.bench.reporting.report import write
from tests.bench.systems.servers import embedded
from tests.fakes.key_files import write_keys
from tests.integration.gateway.test_hostile import connection, upload
from tests.integration.gateway_fakes import Stage, open_stage

MIB: Final = 1 << 20
FOR_S: Final = 10.0
"""How long bob asks, alone and beside alice."""
HELD_S: Final = 6.0
"""How long alice has the pool to herself before."""
ALICE, BOB = ({"Authorization": f"Bearer {key}"} for key in ("sk-alice-123", "sk-robert-12"))
KEY: Final = f"Authorization: {ALICE['Authorization']}\r\n"
FLEET: Final = {"Accept": "text/event-stream"}


LIMITS: Final[dict[str, Any]] = {
    "stall_s": 60, "max_streams": 256, "max_held_bytes": 72 * MIB, "max_connections": 1024,
}  # fmt: skip
"""Small ones, so that little memory holds a pool."""


class Pool(NamedTuple):
    """One pool: who holds it, and what bob does."""

    name: str
    holders: int
    hold: Callable[[Stage, str], Coroutine[Any, Any, None]]
    ask: Callable[[Stage, str], Awaitable[bool]]


async def main() -> None:
    """Measure, print and write."""
    with embedded() as (nats_url, redis_url), tempfile.TemporaryDirectory(prefix="gio-") as folder:
        rows = [await _measure(pool, nats_url, redis_url, Path(folder)) for pool in POOLS]
    write("shared_pools", rows, workload={"for_s": FOR_S, **LIMITS})


async def _measure(pool: Pool, nats_url: str, redis_url: str, folder: Path) -> dict[str, Any]:
    keys = write_keys(folder, {"sk-alice-123": "alice", "sk-robert-12": "bob"})
    async with open_stage(
        nats_url, redis_url, folder, api_keys_file=keys, stall_s=60, max_streams=256
    ) as stage:
        stage.router.picture_bytes = 16 * MIB if pool.name == "answers" else 1000
        alices, bobs = await _job(stage, ALICE), await _job(stage, BOB)
        alone, _ = await _asked(pool, stage, bobs)
        async with asyncio.TaskGroup() as tasks:
            holders = [tasks.create_task(_again(pool, stage, alices)) for _ in range(pool.holders)]
            await asyncio.sleep(HELD_S)
            beside, refused = await _asked(pool, stage, bobs)
            for holder in holders:
                holder.cancel()
    return {
        "pool": pool.name,
        "holders": pool.holders,
        "alone/s": f"{alone:.1f}",
        "beside/s": f"{beside:.1f}",
        "kept": f"{beside / alone:.0%}",
        "refused": refused,
    }


async def _asked(pool: Pool, stage: Stage, job: str) -> tuple[float, int]:
    """Bob's requests that were answered, a second, and how many were refused."""
    began_s, good, bad = time.monotonic(), 0, 0
    while (took_s := time.monotonic() - began_s) < FOR_S:
        if await pool.ask(stage, job):
            good += 1
        else:
            bad += 1
            await asyncio.sleep(0.05)  # a client's own pause
    return good / took_s, bad


async def _again(pool: Pool, stage: Stage, job: str) -> None:
    while True:
        with suppress(OSError):
            await pool.hold(stage, job)
        await asyncio.sleep(1.0)  # as Retry-After says


async def _job(stage: Stage, headers: dict[str, str]) -> str:
    async with stage.http.post("/v1/jobs", data=stage.form(), headers=headers) as response:
        job_id = str((await response.json())["id"])
    async with stage.http.get(f"/v1/jobs/{job_id}/events", headers=headers) as response:
        await response.read()
    return job_id


async def _hold(stage: Stage, sent: bytes, pause_s: float = 0.0) -> None:
    """Send, and read until the gateway ends it; with a pause, slowly."""
    async with connection(stage, 4096 if pause_s else None) as (reader, writer):
        writer.write(sent)
        while await reader.read(64 if pause_s else 1 << 16):  # noqa: ASYNC110 - a reader's own pace
            await asyncio.sleep(pause_s)


def _get(path: str, accept: str = "*/*") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\nAccept: {accept}\r\n{KEY}\r\n".encode()


async def _slow_answer(stage: Stage, job: str) -> None:
    await _hold(stage, _get(f"/v1/jobs/{job}/image"), 0.2)


async def _stopped_body(stage: Stage, _: str) -> None:
    await _hold(stage, upload(5 * MIB, 4 * MIB, KEY))


async def _stream(stage: Stage, _: str) -> None:
    await _hold(stage, _get("/v1/fleet", FLEET["Accept"]))


async def _silent(stage: Stage, _: str) -> None:
    await _hold(stage, b"")


async def _image(stage: Stage, job: str) -> bool:
    async with stage.http.get(f"/v1/jobs/{job}/image", headers=BOB) as response:
        return bool(await response.read()) and response.status == 200


async def _edit(stage: Stage, _: str) -> bool:
    async with stage.http.post("/v1/images/edits", data=stage.form(b"x" * 5 * MIB), headers=BOB) as response:
        await response.read()
        return response.status == 200


async def _watch(stage: Stage, _: str) -> bool:
    async with stage.http.get("/v1/fleet", headers=BOB | FLEET) as response:
        return response.status == 200 and bool(await response.content.readline())


async def _fresh(stage: Stage, _: str) -> bool:
    async with aiohttp.ClientSession(stage.url) as http:
        try:
            async with http.get("/v1/models", headers=BOB) as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False


POOLS: Final = (
    Pool("uploads", 30, _stopped_body, _edit),
    Pool("answers", 12, _slow_answer, _image),
    Pool("streams", 260, _stream, _watch),
    Pool("connections without a key", 400, _silent, _fresh),
)

if __name__ == "__main__":
    uvloop.run(main())
