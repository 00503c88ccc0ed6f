"""How bytes should travel: inline over NATS, or as a claim check to the blob store.

``python -m giornata_lab.bench.payloads`` measures both.

Prints a table and writes ``out/bench/payloads.json``: median and 99th percentile in milliseconds of one hand-over, by
size. Baseline: request-reply with the bytes inline. Ours: put, request-reply with the claim check, get and verify.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable

import uvloop
from nats.aio.msg import Msg

from giornata.blobs import RedisBlobs
from giornata.bus import bus as buses
from giornata.bus.bus import Bus
from giornata.bus.connection import barrier
from giornata.wire.jobs import BlobRef
from giornata_lab.bench.reporting.report import Measurement, measured, write
from giornata_lab.bench.systems.servers import embedded

SIZES = (1 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
REPEATS = 200


async def repeat(once: Callable[[], Awaitable[None]], repeats: int = REPEATS) -> Measurement:
    """Milliseconds of `once`, after a warm-up of a tenth."""
    times = []
    for i in range(repeats + repeats // 10):
        began = time.perf_counter()
        await once()
        if i >= repeats // 10:
            times.append((time.perf_counter() - began) * 1000)
    return measured(times)


async def main() -> None:
    """Measure every size both ways, in one run against the same servers."""
    with embedded() as (nats_url, redis_url):
        async with (
            buses.connect(nats_url, "sender") as sender,
            buses.connect(nats_url, "receiver") as receiver,
            RedisBlobs.open(redis_url) as blobs,
        ):
            await _receive(receiver, blobs)
            rows = [await _row(size, sender, blobs) for size in SIZES]
    write("payloads", rows, workload={"repeats": REPEATS, "sizes_bytes": SIZES})


async def _receive(receiver: Bus, blobs: RedisBlobs) -> None:
    """Answer both kinds of hand-over for as long as the connection lives."""

    async def take_inline(message: Msg) -> None:
        await message.respond(b"ok")

    async def take_claim_check(message: Msg) -> None:
        key, count, digest = message.data.decode().split()
        await blobs.get(BlobRef(key=key, size_bytes=int(count), sha256=digest))
        await message.respond(b"ok")

    await receiver.client.subscribe("bench.inline", cb=take_inline)
    await receiver.client.subscribe("bench.claim", cb=take_claim_check)
    await barrier(receiver.client)


async def _row(size: int, sender: Bus, blobs: RedisBlobs) -> dict[str, object]:
    data = os.urandom(size)

    async def inline() -> None:
        await sender.client.request("bench.inline", data, timeout=5)

    async def claim_check() -> None:
        ref = await blobs.put("bench", data, 60)
        check = f"{ref.key} {ref.size_bytes} {ref.sha256}".encode()
        await sender.client.request("bench.claim", check, timeout=5)

    baseline, ours = await repeat(inline), await repeat(claim_check)
    return {
        "bytes": size,
        "ratio": baseline.p50_ms / ours.p50_ms,
        "inline_ms": baseline.as_dict(),
        "claim_check_ms": ours.as_dict(),
    }


if __name__ == "__main__":
    uvloop.run(main())
