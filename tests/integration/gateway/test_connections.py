"""Clients that hold connections: heads and bodies that do not come, and more connections than there may be."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import uvloop

from giornata_gateway.http import server as connections
from tests.fakes.key_files import write_keys
from tests.integration.gateway.test_hostile import connection
from tests.integration.gateway_fakes import Opening
from tests.patience import HUNG_S

CROWD = 200
"""More than wait to be accepted by default."""
PING = b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n"


def form(image_bytes: int) -> bytes:
    """A whole edit."""
    part = '--b\r\nContent-Disposition: form-data; name="{}"\r\n\r\n{}\r\n'
    image = part.format('image"; filename="a.png', "x" * image_bytes)
    body = image + part.format("prompt", "a hat") + "--b--\r\n"
    head = "POST /v1/images/edits HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


async def everything(reader: asyncio.StreamReader) -> bytes:
    """What comes until the gateway closes the connection."""
    return await asyncio.wait_for(reader.read(), HUNG_S)


async def one_answer(reader: asyncio.StreamReader) -> bytes:
    """The head of an answer whose body is read too."""
    async with asyncio.timeout(HUNG_S):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: "))
        await reader.readexactly(int(length.partition(b" ")[2]))
        return head


async def test_what_comes_at_once_is_parsed_in_pieces(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others have their turns between, however many chunks a read holds; the answer is that to a body in one chunk."""
    sizes: list[int] = []
    parse = connections._Connection._parse

    def told(self: connections._Connection, data: bytes) -> None:
        sizes.append(len(data))
        parse(self, data)

    monkeypatch.setattr(connections._Connection, "_parse", told)
    head = b"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    body = b'{"prompt": "%s", "n": "two"}' % (b"x" * 50_000)
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    answers = []
    async with opening() as stage:
        for sent in (
            head + b"Content-Length: %d\r\n\r\n" % len(body) + body,
            head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks,
        ):
            sizes.clear()
            async with connection(stage) as (reader, writer):
                writer.write(sent + PING)
                answers.append((await one_answer(reader)).partition(b"\r\n")[0])
                assert (await one_answer(reader)).startswith(b"HTTP/1.1 ")
            assert sum(sizes) == len(sent + PING), "in order, and nothing twice"
            assert max(sizes) <= connections.PIECE_BYTES
    assert answers[0] == answers[1]


async def test_heads_that_do_not_come_are_answered_and_their_connections_closed(opening: Opening) -> None:
    async def half(sent: bytes) -> bytes:
        async with connection(stage, sent) as (reader, _):
            return await everything(reader)

    async with opening(head_s=0.3) as stage:
        answers = await asyncio.gather(*(half(b"GET /readyz HTTP/1.1\r\nHost: x\r\n") for _ in range(5)))
        assert {answer.partition(b"\r\n")[0] for answer in answers} == {b"HTTP/1.1 408 Request Timeout"}
        assert all(b'"code":"request_timeout"' in answer for answer in answers)
        assert await half(b"") == b"", "a connection without a request is closed without a word"
        assert 'code="request_timeout"' in (await stage.get("/metrics")).text


def test_half_a_head_that_comes_with_its_connection_is_no_excuse(opening: Opening) -> None:
    """The services' own loop may read it before aiohttp's task has begun to wait for a request.

    All of them come while the loop stands still, and none is reset.
    """

    def halves(address: tuple[str, int]) -> list[socket.socket]:
        peers = [socket.create_connection(address) for _ in range(CROWD)]
        for peer in peers:
            peer.sendall(b"GET /readyz HTTP/1.1\r\nHost: x\r\n")
        return peers

    async def firsts() -> set[bytes]:
        async with opening(head_s=0.3, idle_s=2 * HUNG_S) as stage:
            peers = halves(
                ("127.0.0.1", int(stage.url.rpartition(":")[2]))
            )  # the loop stands still meanwhile
            opened = [await asyncio.open_connection(sock=peer) for peer in peers]
            told = await asyncio.gather(*(everything(reader) for reader, _ in opened))
            for _, writer in opened:
                writer.close()
            return {one.partition(b"\r\n")[0] for one in told}

    assert uvloop.run(firsts()) == {b"HTTP/1.1 408 Request Timeout"}


async def test_a_head_that_trickles_is_no_excuse(opening: Opening) -> None:
    clock = asyncio.get_running_loop().time
    async with opening(head_s=0.5) as stage, connection(stage) as (reader, writer):
        began_s = clock()
        writer.write(b"GET /readyz HTTP/1.1\r\nX: ")
        for _ in range(9):
            writer.write(b"x")
            await asyncio.sleep(0.05)  # the client's own
        assert (await everything(reader)).startswith(b"HTTP/1.1 408 ")
        assert clock() - began_s == pytest.approx(0.5, abs=0.01)


async def test_a_connection_may_rest_between_two_requests_but_not_within_a_head(opening: Opening) -> None:
    async with opening(head_s=1.0) as stage, connection(stage) as (reader, writer):
        edit = form(2000)
        for first, rest, pause_s in ((PING, b"", 1.5), (edit[:1000], edit[1000:], 1.5), (PING, b"", 0.0)):
            writer.write(first)
            await writer.drain()
            writer.write(rest)
            assert (await one_answer(reader)).startswith(b"HTTP/1.1 200 ")
            await asyncio.sleep(pause_s)  # the client's own
        writer.write(PING[:10])
        assert (await everything(reader)).startswith(b"HTTP/1.1 408 ")


async def test_an_idle_connection_is_closed(opening: Opening) -> None:
    async with opening(idle_s=0.3) as stage, connection(stage) as (reader, writer):
        writer.write(PING)
        assert (await one_answer(reader)).startswith(b"HTTP/1.1 200 ")
        assert await everything(reader) == b""


async def test_an_edit_that_takes_longer_than_a_head_may_is_answered(opening: Opening) -> None:
    async with opening(head_s=1.0, idle_s=2.0) as stage:
        running = await stage.begin(stage.edit())
        async with connection(stage) as (reader, writer):
            writer.write(PING)
            assert (await one_answer(reader)).startswith(b"HTTP/1.1 200 ")
            assert await everything(reader) == b"", "as long as a connection may be idle"
        async with connection(stage) as (reader, writer):
            writer.write(PING[:10])
            assert (await everything(reader)).startswith(b"HTTP/1.1 408 "), "as long as a head may take"
        stage.router.go_on()
        assert (await running).status == 200


@pytest.mark.parametrize(("pause_s", "status"), [(0.05, b"408"), (0.0, b"200")])
async def test_a_body_comes_at_a_pace(opening: Opening, pause_s: float, status: bytes) -> None:
    """20 kB at 2 kB/s are refused at a fiftieth of the time that a body may take as a whole."""
    whole = form(20_000)
    options = {"head_s": 0.5, "receive_bytes_per_s": 20_000, "receive_s": 60.0}
    async with opening(**options) as stage, connection(stage) as (reader, writer):
        answer = asyncio.ensure_future(one_answer(reader))
        for first in range(0, len(whole), 100):
            if answer.done():
                break
            writer.write(whole[first : first + 100])
            if pause_s:
                await asyncio.wait([answer], timeout=pause_s)
        assert (await answer).split(b" ")[1] == status


async def test_a_newer_connection_takes_the_place_of_the_oldest_that_showed_no_key(opening: Opening) -> None:
    async with opening(max_connections=2) as stage, connection(stage) as (reader, writer):
        writer.write(PING)
        await one_answer(reader)
        async with connection(stage) as (second, ask):
            assert await everything(reader) == b""
            ask.write(PING)
            assert (await one_answer(second)).startswith(b"HTTP/1.1 200 ")


async def test_tenants_share_connections_and_strangers_take_none_of_them(
    opening: Opening, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path, {"sk-alice-123": "alice", "sk-robert-12": "bob"})
    whom = "GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {}\r\n\r\n"
    alice, bob = whom.format("sk-alice-123").encode(), whom.format("sk-robert-12").encode()
    async with opening(max_connections=8, api_keys_file=keys) as stage, AsyncExitStack() as held:

        async def connected(sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            opened = await held.enter_async_context(connection(stage))
            opened[1].write(sent)
            return opened

        first, own = await connected(bob)
        assert (await one_answer(first)).startswith(b"HTTP/1.1 200 ")
        for _ in range(20):
            await connected(b"")
        alices = []
        for _ in range(5):
            reader, _ = await connected(alice)
            assert (await one_answer(reader)).startswith(b"HTTP/1.1 200 ")
            alices.append(reader)
        another, _ = await connected(alice)
        assert (await one_answer(another)).startswith(b"HTTP/1.1 503 ")
        second, _ = await connected(bob)
        assert (await one_answer(second)).startswith(b"HTTP/1.1 200 ")
        assert await everything(alices[0]) == b"", (
            "of the tenant that has most, the one that rested for longest"
        )
        own.write(bob)
        assert (await one_answer(first)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux ends such connections by tcp(7)")
def test_a_peer_that_vanishes_is_noticed_by_the_kernel(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's part cannot be tested without cutting a line; that it was asked to can."""
    peers: list[socket.socket] = []
    ask = connections.drop_vanished

    def asked(peer: socket.socket, unheard_s: float) -> None:
        ask(peer, unheard_s)
        peers.append(peer)

    monkeypatch.setattr(connections, "drop_vanished", asked)

    async def whole_answer() -> None:
        async with opening(stall_s=7) as stage, stage.http.get("/readyz"):
            options = {
                socket.TCP_USER_TIMEOUT: 7000,
                socket.TCP_KEEPIDLE: 7,
                socket.TCP_KEEPINTVL: 1,
                socket.TCP_KEEPCNT: connections.PROBES,
            }
            assert {name: peers[-1].getsockopt(socket.IPPROTO_TCP, name) for name in options} == options
            assert peers[-1].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

    asyncio.run(whole_answer())
