"""Three hundred slow connections at the gateway's default limits: when each kind is gone, and what others notice.

A gateway in front of a scripted router, with real NATS and Valkey, so that latencies are the door's and not a model's.
An edit of another client is asked again and again: for a while before the crowd comes, and until the last of it is gone
but for the connections that rest. All of them come at once, and none ever ends by itself. Takes a minute and a half.

Writes ``out/bench/slow_crowd.json``.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

import uvloop

from giornata_lab.bench.reporting.report import measured, write
from giornata_lab.bench.systems.servers import embedded
from tests.integration.gateway.test_connections import PING, one_answer
from tests.integration.gateway.test_hostile import connection, upload
from tests.integration.gateway_fakes import Stage, open_stage

EACH: Final = 50
"""Clients of each of six kinds that send something, or nothing; as many that rest come beside them."""
BEFORE_S: Final = 15.0
DROP_S: Final = 1.0
"""Between the bytes of a client that trickles."""
HEAD: Final = b"GET /readyz HTTP/1.1\r\nHost: x\r\nX-Slow: "
JSON_HEAD: Final = (
    b"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: 100000\r\n\r\n"
)
LIMITS: Final = frozenset({"head_s", "idle_s", "receive_bytes_per_s", "receive_s", "stall_s"})
Client = Callable[[Stage], Coroutine[Any, Any, tuple[float, str]]]


async def main() -> None:
    """Measure, print and write."""
    with embedded() as (nats_url, redis_url), tempfile.TemporaryDirectory(prefix="gio-") as folder:
        async with open_stage(nats_url, redis_url, Path(folder)) as stage:
            before = await _edits_until(stage, asyncio.create_task(asyncio.sleep(BEFORE_S)))
            crowd = {
                kind: [asyncio.create_task(client(stage)) for _ in range(EACH)]
                for kind, client in CLIENTS.items()
            }
            resting = [asyncio.create_task(_gone(stage, PING)) for _ in range(EACH)]
            slow = asyncio.gather(*(one for clients in crowd.values() for one in clients))
            during = await _edits_until(stage, slow)
            rested_s = await asyncio.gather(*resting)
            rows = [{"what": kind, **_ends([one.result() for one in them])} for kind, them in crowd.items()]
            rows.append({"what": "resting after an answer", **_ends(rested_s)})
            limits = stage.config.model_dump(include=set(LIMITS))
    rows += [
        {"what": name, **_latency(ms)} for name, ms in (("edits before", before), ("edits during", during))
    ]
    blank = dict.fromkeys(("what", "first", "last", "ends", "p50", "p95", "max", "count"), "")
    write("slow_crowd", [blank | row for row in rows], workload={"each": EACH, **limits})


async def _edits_until(stage: Stage, ended: asyncio.Future[Any]) -> list[float]:
    """Milliseconds of each edit that is answered, one after the other, until `ended` has."""
    took_ms = []
    while not ended.done():
        began_s = time.perf_counter()
        status, answer = await stage.edit()
        if status != 200:
            raise SystemExit(f"an edit of another client failed: {answer}")
        took_ms.append((time.perf_counter() - began_s) * 1e3)
    await ended
    return took_ms


async def _gone(stage: Stage, sent: bytes, drop: bytes = b"") -> tuple[float, str]:
    """Seconds from a client's last whole act to the end of its connection, and how that ends.

    It sends `drop` each second for ever. An end is a status, a closed connection, or one that is reset: the gateway's
    answer may be lost where something is still sent to it.
    """
    async with connection(stage) as (reader, writer):
        writer.write(sent)
        if sent == PING:
            await one_answer(reader)
        began_s = time.perf_counter()
        told = asyncio.ensure_future(reader.read())
        while not told.done():
            writer.write(drop)
            await asyncio.wait([told], timeout=DROP_S)
        words = b"" if told.exception() else told.result()
        end = "reset" if told.exception() else words[9:12].decode() or "closed"
        return time.perf_counter() - began_s, end


CLIENTS: Final[dict[str, Client]] = {
    "opened, silent": lambda stage: _gone(stage, b""),
    "half a head": lambda stage: _gone(stage, HEAD),
    "a head, a byte a second": lambda stage: _gone(stage, HEAD, b"x"),
    "10 bytes of a form": lambda stage: _gone(stage, upload(size=10_000, sent=10)),
    "a form, a byte a second": lambda stage: _gone(stage, upload(size=10_000, sent=10), b"x"),
    "a JSON body, a byte a second": lambda stage: _gone(stage, JSON_HEAD, b" "),
}


def _ends(found: Sequence[tuple[float, str]]) -> dict[str, Any]:
    seconds = [one for one, _ in found]
    ends = ", ".join(f"{count} {end}" for end, count in Counter(end for _, end in found).most_common())
    return {
        "first": f"{min(seconds):.1f} s",
        "last": f"{max(seconds):.1f} s",
        "ends": ends,
        "count": len(found),
    }


def _latency(took_ms: list[float]) -> dict[str, Any]:
    told = measured(took_ms)
    shown = {"p50": told.p50_ms, "p95": told.p95_ms, "max": max(took_ms)}
    return {name: f"{ms:.0f} ms" for name, ms in shown.items()} | {"count": told.count}


if __name__ == "__main__":
    uvloop.run(main())
