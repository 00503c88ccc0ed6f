"""Limits on the structure of JSON and msgpack from strangers: they hold before Python makes objects of it."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any, Final

import msgpack
import pytest

from giornata.wire import codec
from giornata.wire.codec import DEPTH, ESCAPE_EVERY, ESCAPES, NAMES, VALUES, JsonLimits, read_json
from giornata.wire.errors import PayloadTooLarge, SchemaMismatch, UnknownField
from giornata.wire.messages import CancelMessage
from giornata.wire.requests import GenerationParameters, asked

MIB: Final = 1 << 20


def take_all(text: bytes) -> None:
    limits = JsonLimits()
    for start in range(0, len(text), 1000):
        limits.take(text[start : start + 1000])


@pytest.mark.parametrize(
    "text",
    [
        b'{"prompt":[' + b"[]," * VALUES,
        b'{"prompt":' + b"[" * (VALUES + 1),
        b"{" + b'"n":1,' * VALUES,
        b'{"prompt":"' + b"\\u0041" * MIB,
    ],
    ids=["lists", "depth", "names", "escapes"],
)
def test_json_of_too_many_values_is_refused_as_it_comes(text: bytes) -> None:
    with pytest.raises(PayloadTooLarge, match="too many values"):
        take_all(text)


@pytest.mark.parametrize(
    "value",
    [
        {
            "prompt": "a hat, [red]: {big}" * 200,
            "negative_prompt": "🎩é\n" * 1000,
            "loras": [{"id": "x"}] * 8,
        },
        {"prompt": "🎩" * 32_000},
        {"init_images": ["data:image/png;base64," + "Ab/+" * (MIB // 16)]},
    ],
    ids=["words", "the longest prompt", "a picture"],
)
@pytest.mark.parametrize("slash", ["/", "\\/"], ids=["plain", "as PHP writes it"])
def test_json_of_a_request_passes(value: dict[str, Any], slash: str) -> None:
    text = json.dumps(value).replace("Ab/+", f"Ab{slash}+{'A' * 60}")
    take_all(text.encode())
    assert read_json(text) == json.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"a":' + "[" * DEPTH + "]" * DEPTH + "}",
        "{" + ",".join(f'"{number}":0' for number in range(NAMES + 1)) + "}",
        "1" * 100,
        "0." + "1" * 100,
        "[NaN]",
        "[-Infinity]",
    ],
)
def test_json_beyond_the_limits_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read_json(text)


def test_as_many_escapes_pass_as_the_error_says() -> None:
    most = ESCAPES + ESCAPES // (ESCAPE_EVERY - 1)  # each is a byte, too
    take_all(b"\\" * most)
    with pytest.raises(PayloadTooLarge):
        take_all(b"\\" * (most + 1))


def test_json_at_the_limits_is_read() -> None:
    deep = "[" * (DEPTH - 1) + "]" * (DEPTH - 1)
    wide = "{" + ",".join(f'"{number}":0' for number in range(NAMES)) + "}"
    assert read_json(f"[{deep[1:-1]}]") == json.loads(deep)
    assert len(read_json(wide)) == NAMES


def packed(**fields: Any) -> bytes:
    return bytes(msgpack.packb({"schema": 1, "job_id": "job_x"} | fields))


TREE: Final = b"\xdc\x00\xff" + (b"\xdc\x00\xff" + b"\x90" * 255) * 255
BEYOND: Final[dict[str, bytes]] = {
    "a long list": packed(x=[0] * (NAMES + 1)),
    "many names": packed(**{f"n{number}": 0 for number in range(NAMES + 1)}),
    "a tree": packed(x=None)[:-1] + TREE,
    "eight mebibytes of lists": packed(x=None)[:-1] + b"\xdd\x00\x7f\xff\xff" + b"\x90" * 0x7FFFFF,
    "eight mebibytes of claims": packed(x=None)[:-1] + b"\xdd\x00\x19\x99\x99" * 0x19999,
    "a long text": packed(api_key="k" * MIB),
}


@pytest.mark.parametrize("kind", BEYOND)
def test_a_message_beyond_the_limits_takes_little_memory_and_is_refused(kind: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(SchemaMismatch):
            codec.fields_of(CancelMessage, BEYOND[kind], limited=True)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * MIB


def test_a_message_with_pictures_is_read() -> None:
    fields = codec.fields_of(
        CancelMessage, packed(image=b"x" * 6 * MIB, references=[b"y"] * 16), limited=True
    )
    assert len(fields["image"]) == 6 * MIB


def test_an_error_names_few_fields() -> None:
    with pytest.raises(UnknownField) as raised:
        asked(GenerationParameters, {"prompt": "x"} | {f"unknown{number:04}": 0 for number in range(NAMES)})
    assert len(str(raised.value.received)) < 200
    assert f"and {NAMES - 10} more" in raised.value.message
    with pytest.raises(SchemaMismatch) as mismatch:
        codec.decode(CancelMessage, b"\x81\xa6schema\x01")
    assert "job_id" in str(mismatch.value)
