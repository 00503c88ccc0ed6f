"""Dozens of clients that hold their connections in every way: all are gone in time, and others do not notice."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from giornata_gateway.http import connections
from tests.integration.gateway.test_connections import PING, everything, one_answer
from tests.integration.gateway.test_hostile import connection, upload
from tests.integration.gateway_fakes import Opening, Stage

EACH = 8
"""Clients of each of seven kinds."""
PAUSE_S = 0.25
"""Pause of a client that trickles; the client's own."""
JSON_HEAD = (
    b"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: 100000\r\n\r\n"
)
NOWHERE = b"POST /v1/nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{"
LIMITS = {"head_s": 3.0, "idle_s": 4.0, "receive_bytes_per_s": 1000, "receive_s": 60.0}
"""They hold for the client that is not slow, too: longer than a machine that runs tests stands still."""
SLOW = b"HTTP/1.1 408 Request Timeout"


async def stuck(stage: Stage, sent: bytes) -> bytes:
    """The first line of what a client gets that sends no more than `sent`; empty where it is closed without a word."""
    async with connection(stage) as (reader, writer):
        writer.write(sent)
        return (await everything(reader)).partition(b"\r\n")[0]


async def idle(stage: Stage) -> bytes:
    """What a client gets after its first answer, if it asks for nothing more."""
    async with connection(stage) as (reader, writer):
        writer.write(PING)
        await one_answer(reader)
        return await everything(reader)


async def trickling(stage: Stage, head: bytes, drop: bytes) -> bytes:
    """The first line of what a client gets that never ends to send; the rest of it may be lost to its own sending."""
    async with connection(stage) as (reader, writer):
        writer.write(head)
        told = asyncio.ensure_future(everything(reader))
        while not told.done():
            writer.write(drop)
            await asyncio.wait([told], timeout=PAUSE_S)
        return SLOW if told.exception() else told.result().partition(b"\r\n")[0]


@pytest.mark.long  # each kind alone is in test_connections and test_hostile
async def test_dozens_of_slow_clients_are_gone_and_others_do_not_notice(opening: Opening) -> None:
    async with opening(**LIMITS) as stage:
        kinds: list[Callable[[], Coroutine[Any, Any, bytes]]] = [
            lambda: stuck(stage, b""),
            lambda: stuck(stage, b"GET /readyz HTTP/1.1\r\nHost: x\r\n"),
            lambda: trickling(stage, b"GET /readyz HTTP/1.1\r\nX: ", b"x"),
            lambda: stuck(stage, upload(size=10_000, sent=10)),
            lambda: trickling(stage, JSON_HEAD, b" "),
            lambda: stuck(stage, NOWHERE),
        ]
        slow = [asyncio.ensure_future(kind()) for kind in kinds for _ in range(EACH)]
        slow += [asyncio.ensure_future(idle(stage)) for _ in range(EACH)]
        served = 0
        while not all(one.done() for one in slow):
            status, _ = await stage.edit()
            assert status == 200
            served += 1
        counted = Counter(one.result() for one in slow)
        assert counted == {b"": 2 * EACH, SLOW: 4 * EACH, b"HTTP/1.1 404 Not Found": EACH}
        assert served > 1
        async with stage.http.get("/metrics") as response:
            told = await response.text()
        assert sum(
            float(line.rpartition(" ")[2])
            for line in told.splitlines()
            if line.startswith("giornata_requests_total") and 'code="request_timeout"' in line
        ) == (4 * EACH)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux ends such connections by tcp(7)")
async def test_a_peer_that_vanishes_is_noticed_by_the_kernel(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's part cannot be tested without cutting a line; that it was asked to can."""
    peers: list[socket.socket] = []
    ask = connections.drop_vanished

    def asked(peer: socket.socket, unheard_s: float) -> None:
        ask(peer, unheard_s)
        peers.append(peer)

    monkeypatch.setattr(connections, "drop_vanished", asked)
    async with opening(stall_s=7) as stage, connection(stage) as (reader, writer):
        writer.write(PING)
        await one_answer(reader)
        options = {
            socket.TCP_USER_TIMEOUT: 7000,
            socket.TCP_KEEPIDLE: 7,
            socket.TCP_KEEPINTVL: 1,
            socket.TCP_KEEPCNT: connections.PROBES,
        }
        assert {name: peers[-1].getsockopt(socket.IPPROTO_TCP, name) for name in options} == options
        assert peers[-1].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
