"""Bytes that are no request, or would become very many objects: an error like any other, and none in the log."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any, Final

import msgpack
import pytest
from structlog.testing import capture_logs

from giornata.bus import bus
from giornata.bus.connection import MAX_HEADER_BYTES
from giornata.wire import codec
from giornata_gateway.http import server as connections
from tests.fakes.key_files import write_keys
from tests.integration.gateway.test_hostile import WHOLE, answer_to, connection
from tests.integration.gateway_fakes import Opening, Stage
from tests.patience import HUNG_S

KEY: Final = "gio_never-in-a-log-0123456789"
BEARER: Final = b"Authorization: Bearer " + KEY.encode() + b"\r\n"
GET: Final = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"
POST: Final = (
    b"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + BEARER
)
MALFORMED: Final[dict[str, bytes]] = {
    "a space before the colon": GET + BEARER.replace(b":", b" :", 1) + b"\r\n",
    "a zero byte": GET + BEARER.replace(b"gio", b"\0gio") + b"\r\n",
    "a folded header": GET + BEARER.replace(b"Bearer ", b"Bearer\r\n ") + b"\r\n",
    "a head without a colon": GET + BEARER.replace(b": ", b" ") + b"\r\n",
    "a header that is too long": GET + b"X-Long: " + b"x" * 20_000 + b"\r\n" + BEARER + b"\r\n",
    "a target that is too long": GET.replace(b"/v1", b"/" + b"x" * 20_000) + BEARER + b"\r\n",
    "too many headers": GET + BEARER + b"".join(b"X-%d: x\r\n" % number for number in range(2000)) + b"\r\n",
    "no method": GET.replace(b"GET", b"G(T") + BEARER + b"\r\n",
    "another version": GET.replace(b"1.1", b"9.9") + BEARER + b"\r\n",
    "another protocol": KEY.encode() + b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "no length": POST + b"Content-Length: many\r\n\r\n{}",
    "a negative length": POST + b"Content-Length: -2\r\n\r\n{}",
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a length and chunks": POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks of no size": POST + b"Transfer-Encoding: chunked\r\n\r\n" + KEY.encode() + b"\r\n{}\r\n0\r\n\r\n",
    "two hosts": GET + b"Host: y\r\n" + BEARER + b"\r\n",
    "no host": b"GET /v1/models HTTP/1.1\r\n" + BEARER + b"\r\n",
}
TWICE: Final[dict[str, bytes]] = {
    "Authorization": BEARER + BEARER.replace(b"never", b"other"),
    "X-Api-Key": b"X-Api-Key: a\r\nX-Api-Key: b\r\n",
    "Idempotency-Key": b"Idempotency-Key: a\r\nIdempotency-Key: b\r\n",
    "Last-Event-ID": b"Last-Event-ID: 1\r\nLast-Event-ID: 2\r\n",
    "Sec-Fetch-Site": b"Sec-Fetch-Site: none\r\nSec-Fetch-Site: cross-site\r\n",
}


async def told(stage: Stage, request: bytes) -> tuple[int, bytes, dict[str, Any]]:
    """Status, head and error of the one answer to a request."""
    async with connection(stage) as (reader, writer), asyncio.timeout(HUNG_S):
        writer.write(request)
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = await reader.readline()
            assert line, "the connection was closed within the head"
            head += line
        length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        body = await reader.readexactly(int(length.split(b":")[1]))
    return int(head.split(b" ", 2)[1]), head, json.loads(body)["error"]


async def test_a_malformed_request_is_answered_in_json_and_not_repeated(
    opening: Opening, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = write_keys(tmp_path, {KEY: "alice"})
    async with opening(api_keys_file=keys) as stage:
        for kind, request in MALFORMED.items():
            with capture_logs() as logs, caplog.at_level(logging.DEBUG):
                status, head, error = await told(stage, request)
            assert (kind, status, error["code"]) == (kind, 400, "bad_request")
            assert b"application/json" in head, kind
            assert b"aiohttp" not in head.lower(), kind
            everything = json.dumps(error) + caplog.text + repr(logs)
            assert KEY not in everything, kind
            assert KEY[4:] not in everything, kind
            assert "Traceback" not in everything, kind
            assert len(everything) < 20_000, kind
            caplog.clear()


async def test_malformed_requests_are_told_in_few_lines(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LOG_EVERY_S", float("inf"))
    bad = next(iter(MALFORMED.values()))
    async with opening() as stage:
        with capture_logs() as logs:
            for _ in range(20):
                assert (await told(stage, bad))[0] == 400
        assert "bad_request" in (await stage.get("/metrics")).text, "each is counted"
    assert [entry["event"] for entry in logs] == ["malformed_requests"]


async def test_an_expectation_that_is_not_met_is_told_in_json(opening: Opening) -> None:
    async with opening() as stage:
        status, head, error = await told(stage, GET + b"Expect: miracles\r\nConnection: close\r\n\r\n")
    assert (status, error["code"]) == (417, "http_error")
    assert b"X-Request-Id: req_" in head, "no middleware has seen the request"
    assert b"miracles" not in head
    assert "miracles" not in str(error)


async def test_a_header_that_is_given_twice_is_refused(opening: Opening, tmp_path: Path) -> None:
    keys = write_keys(tmp_path, {KEY: "alice"})
    async with opening(api_keys_file=keys) as stage:
        for name, twice in TWICE.items():
            alone = b"" if name == "Authorization" else BEARER
            status, head, error = await told(stage, GET + alone + twice + b"\r\n")
            assert (status, error["code"], error["param"]) == (400, "invalid_field", name)
            assert b"Server: giornata\r\n" in head
        answer = await stage.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"})
        assert (answer.status, answer.headers["Server"]) == (200, "giornata")


# Small bytes that would become very many objects: refused before they do, and the door stays open for others.


MIB: Final = 1 << 20
LISTS: Final = b'{"prompt":[' + b"[]," * (MIB // 8) + b"[]]}"
NAMES: Final = b"{" + b",".join(b'"n%d":0' % number for number in range(2000)) + b"}"
JSON: Final[dict[str, tuple[bytes, int, str]]] = {
    "lists": (LISTS, 413, "payload_too_large"),
    "depth": (b'{"prompt":' + b"[" * 8000 + b"]" * 8000 + b"}", 400, "bad_request"),
    "a deep list": (b'{"prompt":' + b"[" * 100 + b"]" * 100 + b"}", 400, "bad_request"),
    "unknown names": (NAMES, 400, "bad_request"),
    "escapes": (b'{"prompt":"' + b"\\u0041" * (MIB // 8) + b'"}', 413, "payload_too_large"),
    "a long number": (b'{"prompt":"x","seed":' + b"1" * (MIB // 8) + b"}", 400, "bad_request"),
}
DOORS: Final = (
    "/v1/images/generations",
    "/v1/jobs",
    "/sdapi/v1/txt2img",
    "/sdapi/v1/img2img",
    "/sdapi/v1/options",
)


async def test_json_is_refused_at_every_door(opening: Opening) -> None:
    async with opening() as stage:
        for door in DOORS:
            for kind, (body, status, code) in JSON.items():
                headers = {"Content-Type": "application/json"}
                answer = await stage.post(door, data=body, headers=headers)
                assert (door, kind, *answer.code) == (door, kind, status, code)
                assert len(answer.text) < 2000
        assert (await stage.edit()).status == 200


async def test_json_is_refused_while_it_comes(opening: Opening) -> None:
    head = (
        b"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: 70000000\r\n\r\n"
    )
    async with (
        opening(receive_s=3600, head_s=600) as stage,
        connection(stage) as (reader, writer),
        asyncio.timeout(HUNG_S),
    ):
        writer.write(head + LISTS[: MIB // 4])  # and no more
        assert b" 413 " in await reader.readline()


async def test_lines_outside_of_parts_are_few(opening: Opening) -> None:
    part = b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nx\r\n'
    bodies = {
        "a preamble": b"\r\n" * 10_000 + part + b"--b--\r\n",
        "headers of a part": part.replace(b"\r\n\r\n", b"\r\n" + b"X: y\r\n" * 100 + b"\r\n") * 40
        + b"--b--\r\n",
    }
    head = (
        b"POST %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        b"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: %d\r\n\r\n"
    )
    async with opening() as stage:
        for door in (b"/v1/images/edits", b"/v1/jobs", b"/v1/templates", b"/v1/masks", b"/v1/loras"):
            for kind, body in bodies.items():
                status, told = await answer_to(stage, head % (door, len(body)) + body)
                assert (door, kind, status) == (door, kind, 400)
                assert b"too many lines" in told
        assert (await stage.edit()).status == 200


def message(subject: str, **fields: Any) -> bytes:
    return bytes(msgpack.packb(msgpack.unpackb(WHOLE[subject]) | fields))


async def asked(stage: Stage, nats_url: str, subject: str, data: bytes, headers: dict[str, str]) -> str:
    """The code of the answer to a message, or none."""
    async with bus.connect(nats_url, "asks") as connected:
        reply = await connected.client.request(subject, data, timeout=HUNG_S, headers=headers)
    return str(codec.unpack(reply.data).get("code"))


async def test_messages_are_refused_at_every_subject(nats_url: str, opening: Opening, tmp_path: Path) -> None:
    keys = write_keys(tmp_path, {KEY: "alice"})
    lists = b"\xdc\x00\xff" + (b"\xdc\x00\xff" + (b"\xdc\x00\xff" + b"\x90" * 255) * 100) * 100
    async with opening(api_keys_file=keys) as stage:
        for subject in WHOLE:

            async def code(data: bytes, subject: str = subject, **headers: str) -> str:
                return await asked(stage, nats_url, subject, data, headers)

            packed = message(subject, api_key=KEY, x=None)
            assert await code(packed[:-1] + lists) == "malformed_message"
            assert await code(message(subject, api_key=KEY, x=[0] * 5000)) == "malformed_message"
            assert await code(packed, Long="x" * MAX_HEADER_BYTES) == "malformed_message"
            assert await code(packed, Short="x") != "malformed_message"


async def test_the_key_is_looked_at_before_anything_else(
    nats_url: str, opening: Opening, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path, {KEY: "alice"})
    async with opening(api_keys_file=keys) as stage:
        for subject in WHOLE:
            wrong = dict.fromkeys(msgpack.unpackb(WHOLE[subject]).keys() - {"schema"}, -1)
            for key in ({}, {"api_key": "gio_b"}, {"api_key": 7}):
                assert (
                    await asked(stage, nats_url, subject, message(subject, **wrong | key), {})
                    == "unauthorized"
                )
            told = await asked(stage, nats_url, subject, message(subject, **wrong | {"api_key": KEY}), {})
            assert told == "malformed_message"
