"""Bytes that are no request of HTTP: an error like any other, and no word of theirs in the log."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any, Final

import pytest
from structlog.testing import capture_logs

from giornata_gateway.http import connections
from tests.fakes.key_files import write_keys
from tests.integration.gateway.test_hostile import connection
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
