"""Small bytes that would become very many objects: refused before they do, and the door stays open for others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import msgpack

from giornata.bus import bus
from giornata.bus.connection import MAX_HEADER_BYTES
from giornata.wire import codec
from tests.fakes.key_files import write_keys
from tests.integration.gateway.test_garbage import WHOLE
from tests.integration.gateway.test_hostile import answer_to, connection
from tests.integration.gateway_fakes import Opening, Stage
from tests.patience import HUNG_S

MIB: Final = 1 << 20
KEY: Final = "gio_a"
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
