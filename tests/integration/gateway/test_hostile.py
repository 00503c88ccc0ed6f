"""Clients that mean harm or do not know better: slow, silent, endless, garbled. Others must not notice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgpack
import pytest
from structlog.testing import capture_logs

from giornata.bus import bus
from giornata.bus.connection import barrier
from giornata.wire import codec, subjects
from giornata.wire.messages import CancelMessage, EditMessage, GenerateMessage, MaskMessage, MaskParameters
from giornata.wire.requests import EditParameters, GenerationParameters
from giornata.wire.subjects import NatsRole, rights
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


# Garbage on every subject that an application may publish to is an error that is counted, and the service
# lives on.


WHOLE: dict[str, bytes] = {
    subjects.EDIT: codec.encode(EditMessage(parameters=EditParameters(prompt="x"), image=b"picture")),
    subjects.GENERATE: codec.encode(GenerateMessage(parameters=GenerationParameters(prompt="x"))),
    subjects.MASK: codec.encode(MaskMessage(parameters=MaskParameters(prompt="x"), image=b"picture")),
    subjects.EDIT_CANCEL: codec.encode(CancelMessage(job_id="job_x")),
}
"""A good message for every subject."""


ODD: Final[Sequence[object]] = (
    None, True, -1, 2**63, -(2**63), 1e308, float("nan"), "", "\x00" * 9, b"\xff", [], [[]], {}, {"a": {}}
)  # fmt: skip
"""Values that no field has."""


def deep(depth: int) -> bytes:
    """A list in a list in a list …"""
    return b"\x91" * depth + b"\x01"


def garbage(subject: str) -> dict[str, bytes]:
    """Messages that are none, by what is wrong with them."""
    whole = WHOLE[subject]
    fields: dict[str, Any] = msgpack.unpackb(whole)
    pack = msgpack.packb
    wrong = {
        "nothing": b"",
        "one byte": b"\xc1",
        "text": b"GET / HTTP/1.1\r\n\r\n",
        "pickle": b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.",
        "no map": pack([1, 2, 3]),
        "a promise of four billion names": b"\xdf\xff\xff\xff\xff\xa1a\x01",
        "a promise of four billion bytes": b"\x81\xa1a\xc6\xff\xff\xff\xff",
        "too deep": deep(100_000),
        "deep in a field": pack(fields | {"parameters": None})[:-1] + deep(100_000),
        "as deep as msgpack lets": b"\x82\xa6schema\x01\xaaparameters" + deep(500),
        "names that are no text": pack({1: 2, b"x": 3}, use_bin_type=True),
        "the same name twice": b"\x82\xa6schema\x01\xa6schema\x02",
        "an extension": pack(fields | {"parameters": msgpack.ExtType(5, b"x" * 100)}),
        "a moment": pack(fields | {"remaining_ms": msgpack.Timestamp(2**33, 1)}),
        "no schema": pack({name: value for name, value in fields.items() if name != "schema"}),
        "schema of tomorrow": pack(fields | {"schema": 2**63}),
        "schema of yesterday": pack(fields | {"schema": -1}),
        "schema as text": pack(fields | {"schema": "1"}),
        "huge": pack(fields | {"reference": [b"x" * (7 << 20)], "job_id": "x"}),
        "huge text": pack(fields | {"api_key": "k" * (2 << 20), "job_id": "j" * (2 << 20)}),
        "no UTF-8": whole.replace(b"prompt", b"\xff\xfe\xfd\xfc\xfb\xfa").replace(
            b"job_x", b"\xff\xfe\xfd\xfc\xfb"
        ),
        "surrogates": whole.replace(b"\xa1x", b"\xa3\xed\xa0\x80").replace(b"\xa5job_x", b"\xa3\xed\xa0\x80"),
        "twice": whole + whole,
    }
    wrong |= {f"cut at {size}": whole[:size] for size in range(1, len(whole))}
    for name in fields.keys() - {"schema"}:
        for odd in ODD:
            wrong[f"{name} = {str(odd)[:20]!r} {type(odd).__name__}"] = pack(fields | {name: odd})
    return wrong


def test_every_subject_of_an_application_is_here() -> None:
    assert set(rights(NatsRole.APPLICATION).publish) == WHOLE.keys()


@pytest.mark.parametrize("subject", sorted(WHOLE))
async def test_garbage_is_answered_with_an_error_and_the_door_stays_open(
    stage: Stage, nats_url: str, subject: str
) -> None:
    messages = garbage(subject)
    with capture_logs() as logs:
        heard = await sent(nats_url, subject, messages)
        async with bus.connect(nats_url, "honest") as connected:
            reply = await connected.client.request(subjects.EDIT, WHOLE[subjects.EDIT], timeout=HUNG_S)
    assert "pictures" in codec.unpack(reply.data)
    assert (await stage.edit()).status == 200
    answers = {name: codec.unpack(data) for name, data in heard.items()}
    unexpected = {name: answer for name, answer in answers.items() if answer.get("code") == "internal_error"}
    assert not unexpected
    assert not [entry for entry in logs if entry["event"] == "handler_failed"]
    refused = [name for name, answer in answers.items() if "code" in answer]
    assert len(refused) > len(messages) // 2
    assert all(len(heard[name]) < 4000 for name in refused), "an error repeats little of its message"
    told = (await stage.get("/metrics")).text
    counted = sum(
        float(line.rpartition(" ")[2])
        for line in told.splitlines()
        if line.startswith("giornata_requests_total") and f'route="{subject}"' in line
    )
    # what asks for an answer is counted before its answer; one that asks nowhere may still be carried out
    assert counted >= 2 * len(messages), "what cannot be read, or be answered, is counted too"


async def sent(nats_url: str, subject: str, messages: Mapping[str, bytes]) -> dict[str, bytes]:
    """Send every message thrice: without an address for the answer, with one, and with one that is no inbox's.

    All answers, by the message's name.
    """
    heard: dict[str, bytes] = {}
    names, whole = list(messages), asyncio.Event()

    async def hear(message: Any) -> None:
        heard[names[int(message.subject.rpartition(".")[2])]] = message.data
        if len(heard) == len(messages):
            whole.set()

    async with bus.connect(nats_url, "garbage") as connected:
        await connected.client.subscribe("_INBOX.garbage.*", cb=hear)
        await barrier(connected.client)
        for number, name in enumerate(names):
            for reply in ("", f"_INBOX.garbage.{number}", "giornata.jobs.batch"):
                await connected.client.publish(subject, messages[name], reply=reply)
            await connected.client.flush(HUNG_S)
        await asyncio.wait_for(whole.wait(), HUNG_S)
    return heard
