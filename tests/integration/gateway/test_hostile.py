"""Clients that mean harm or do not know better: slow, silent, endless, garbled. Others must not notice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.fakes.key_files import write_keys
from tests.fakes.memory_network import NetworkedLoop
from tests.integration.fake_router import picture_of
from tests.integration.gateway.test_jobs import frames_of, submit
from tests.integration.gateway_fakes import Opening, Stage, leave
from tests.patience import HUNG_S

MIB = 1 << 20
LARGE = MIB
"""Bytes of a picture that fits into no buffer of the kernel: a pair of sockets has 208 KiB."""


@asynccontextmanager
async def connection(
    stage: Stage, sent: bytes = b"", receive_buffer: int | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A bare connection, on which `sent` comes with it; with a small buffer it takes nothing that is not read."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, NetworkedLoop)
    peer = await loop.dial(int(stage.url.rpartition(":")[2]), sent=sent, receive_buffer=receive_buffer)
    reader, writer = await asyncio.open_connection(sock=peer, limit=1024)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def answer_to(stage: Stage, request: bytes) -> tuple[int, bytes]:
    """Status and everything of the answer to a request that asks to close the connection."""
    async with connection(stage) as (reader, writer), asyncio.timeout(HUNG_S):
        writer.write(request)
        text = await reader.read(-1)
    return int(text.split(b" ", 2)[1]), text


def upload(size: int, sent: int, headers: str = "") -> bytes:
    """The beginning of a request whose image has `size` bytes, of which `sent` are sent."""
    part = b'--b\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
    head = (
        "POST /v1/images/edits HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        f"Content-Length: {len(part) + size + 100}\r\n{headers}\r\n"
    )
    return head.encode() + part + b"x" * sent


async def test_a_slow_upload_keeps_nobody_out_and_ends_in_time(opening: Opening) -> None:
    async with opening(max_concurrent_rows=1, receive_s=3) as stage, connection(stage) as (reader, writer):
        writer.write(upload(size=1000, sent=10))
        await writer.drain()
        assert (await stage.edit()).status == 200
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), HUNG_S)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"request_timeout"' in answer


async def test_bytes_in_flight_are_limited_and_given_back_once_stored(opening: Opening) -> None:
    options = {"max_held_bytes": 2 * MIB, "max_request_bytes": 2 * MIB}
    async with opening(**options) as stage:
        large = b"x" * (MIB + MIB // 2)
        running = await stage.begin(stage.http.post("/v1/images/edits", data=stage.form(large)))
        assert (await stage.post("/v1/jobs", data=stage.form(large))).status == 202
        stage.router.go_on()
        async with await running as response:
            assert response.status == 200

        async with connection(stage) as (_, writer):
            writer.write(upload(size=len(large), sent=len(large)))
            await writer.drain()
            answer = (await stage.post("/v1/jobs", data=stage.form(large))).expect(429)
            assert int(answer.headers["Retry-After"]) >= 1
            assert (await stage.edit()).status == 200  # a small one fits


async def test_who_does_not_read_the_answer_is_cut_off_and_the_next_is_served(opening: Opening) -> None:
    options = {"max_held_bytes": 2 * MIB, "max_request_bytes": 2 * MIB, "stall_s": 1}
    async with opening(**options) as stage:
        stage.router.picture_bytes = LARGE
        job_id = await submit(stage)
        await frames_of(stage, job_id)
        async with connection(stage, receive_buffer=4096) as (reader, writer):
            writer.write(f"GET /v1/jobs/{job_id}/image HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert b" 200 " in await reader.readline()
            async with asyncio.timeout(HUNG_S), stage.http.get(f"/v1/jobs/{job_id}/image") as response:
                assert await response.read() == picture_of(0, LARGE)


async def test_who_does_not_read_a_stream_gives_its_place_back(opening: Opening) -> None:
    async with opening(stall_s=1, drain_s=600) as stage:
        stage.router.picture_bytes = LARGE
        body = (
            b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nx\r\n'
            b'--b\r\nContent-Disposition: form-data; name="stream"\r\n\r\ntrue\r\n'
            b'--b\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\nx\r\n--b--\r\n'
        )
        head = (
            "POST /v1/images/edits HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        async with connection(stage, receive_buffer=4096) as (reader, writer):
            writer.write(head.encode() + body)
            assert b" 200 " in await reader.readline()
            await stage.router.ended.wait()
            stage.stop.set()
            async with asyncio.timeout(60):  # the drain waits for places, and would for ten minutes
                await stage.serving


async def test_a_client_that_leaves_while_its_job_is_submitted_leaves_no_job(stage: Stage) -> None:
    stage.router.hold, stage.router.answer_when = asyncio.Event(), asyncio.Event()
    for path in ("/v1/images/edits", "/v1/jobs"):
        stage.router.asked.clear()
        stage.router.ended.clear()
        stage.router.answer_when.clear()
        request = asyncio.create_task(stage.http.post(path, data=stage.form()))
        await stage.router.asked.wait()
        await leave(request)
        async with stage.http.get("/healthz"):  # by now the gateway has seen it leave
            stage.router.answer_when.set()
        await asyncio.wait_for(stage.router.ended.wait(), HUNG_S)
        assert (await stage.record()).state == "cancelled"


async def test_a_page_of_another_site_changes_nothing_where_no_key_is_asked_for(stage: Stage) -> None:
    stage.router.hold = asyncio.Event()
    job_id = await submit(stage)
    foreign = {"Sec-Fetch-Site": "cross-site"}
    for method, path in (
        ("POST", "/v1/images/edits"),
        ("POST", "/v1/jobs"),
        ("DELETE", f"/v1/jobs/{job_id}"),
    ):
        assert (
            await stage.ask(method, path, data=stage.form() if method == "POST" else None, headers=foreign)
        ).code == (403, "cross_site")
    assert list(stage.router.jobs) == [job_id]
    assert not (await stage.record()).cancel
    assert (await stage.get(f"/v1/jobs/{job_id}", headers=foreign)).status == 200
    for headers, expected in (
        *(({"Sec-Fetch-Site": site}, 202) for site in ("same-origin", "same-site", "none")),
        ({"Origin": stage.url}, 202),
        ({"Origin": "https://other.example", "Sec-Fetch-Site": "same-site"}, 202),
        ({"Origin": "https://other.example"}, 403),
    ):
        assert (await stage.post("/v1/jobs", data=stage.form(), headers=headers)).status == expected
    stage.router.go_on()


async def test_bytes_that_are_no_text_are_refused_like_anything_else(
    opening: Opening, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path, {"sk-alice-123": "alice"})
    end = b"\r\nHost: x\r\nConnection: close\r\n\r\n"
    async with opening(api_keys_file=keys) as stage:
        status, text = await answer_to(
            stage, b"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer sk-\xff\xfe" + end
        )
        assert (status, b'"unauthorized"' in text) == (401, True)
    async with opening() as stage:
        job_id = await submit(stage)
        path = f"/v1/jobs/{job_id}/events".encode()
        status, text = await answer_to(stage, b"GET " + path + b" HTTP/1.1\r\nLast-Event-ID: \xff" + end)
        assert (status, b'"Last-Event-ID"' in text) == (400, True)
        status, text = await answer_to(stage, b"POST /v1/jobs HTTP/1.1\r\nContent-Type: \xff" + end)
        assert (status, b'"bad_request"' in text) == (400, True)


@pytest.mark.parametrize("host", ["a b", "[", "x:99999", "http://y"])
async def test_a_host_that_is_none_harms_nobody(stage: Stage, host: str) -> None:
    job_id = await submit(stage)
    status, text = await answer_to(
        stage, f"GET /v1/jobs/{job_id} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
    )
    assert status in {200, 400}, text


async def test_bodies_that_unpack_and_names_without_end_are_refused(stage: Stage) -> None:
    packed = {"Content-Encoding": "gzip", "Content-Type": "multipart/form-data; boundary=b"}
    answer = await stage.post("/v1/images/edits", data=b"\x1f\x8b", headers=packed)
    assert (answer.status, answer.error["received"]) == (400, "gzip")
    answer = await stage.post("/v1/images/edits", data=stage.form(**{"n" * 65: "x"}))
    assert answer.code == (400, "bad_request")


async def test_other_methods(stage: Stage) -> None:
    job_id = await submit(stage)
    await frames_of(stage, job_id)
    async with stage.http.head(f"/v1/jobs/{job_id}/image") as response:
        assert (response.status, response.content_length) == (200, len(picture_of(0)))
        assert (response.content_type, await response.read()) == ("image/png", b"")
    assert (await stage.ask("HEAD", f"/v1/jobs/{job_id}/events")).status == 405
    answer = await stage.ask("OPTIONS", "/v1/jobs")
    assert (answer.status, answer.headers["Allow"]) == (405, "POST")
    assert (await stage.get(f"/v1/jobs/{job_id}/image")).body == picture_of(0)
