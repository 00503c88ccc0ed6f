"""What is on the wire today must be readable tomorrow; golden bytes pin it."""

from __future__ import annotations

import msgpack
import pytest
from pydantic import BaseModel

from giornata.wire import codec, messages
from giornata.wire.errors import PayloadTooLarge, SchemaMismatch
from giornata.wire.messages import (
    CancelRows,
    FoundRegion,
    MaskCard,
    MaskedRegion,
    MaskParameters,
    MaskPicture,
    Picture,
    StepEvent,
)
from giornata.wire.values import WireModel
from tests.contract import golden
from tests.contract.messages import MESSAGES

GOLDEN = dict(line.split() for line in golden.BYTES.read_text(encoding="ascii").splitlines())


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_are_written_and_read_as_the_golden_bytes(message: BaseModel) -> None:
    pinned = bytes.fromhex(GOLDEN[type(message).__name__])
    assert codec.encode(message) == pinned
    assert codec.decode(type(message), pinned) == message


def test_an_absent_field_means_what_it_meant() -> None:
    assert golden.default_lines() == golden.DEFAULTS.read_text(encoding="ascii").splitlines()


def test_every_message_is_pinned() -> None:
    sent = {
        kind
        for kind in vars(messages).values()
        if isinstance(kind, type) and issubclass(kind, WireModel) and kind.__module__ == messages.__name__
    }
    nested = {Picture, MaskPicture, MaskedRegion, FoundRegion, MaskParameters, MaskCard}  # inside of messages
    assert sent - nested <= {type(message) for message in MESSAGES}


def test_a_field_of_a_newer_version_is_ignored() -> None:
    data = msgpack.packb({"schema": codec.SCHEMA, "job_id": "j", "attempt": 1, "colour": "teal"})
    assert codec.decode(CancelRows, data) == CancelRows(job_id="j", attempt=1)


def test_every_missing_or_wrong_field_is_named() -> None:
    data = msgpack.packb({"schema": codec.SCHEMA, "job_id": "j", "attempt": "many"})
    with pytest.raises(SchemaMismatch, match=r"attempt: .*index: .*step: .*steps: "):
        codec.decode(StepEvent, data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb([1, 2]),
        msgpack.packb({"job_id": "j", "attempt": 1}),
        msgpack.packb({"schema": codec.SCHEMA + 1, "job_id": "j", "attempt": 1}),
        msgpack.packb({1: 2}),
        b"\xdf\xff\xff\xff\xff",
        msgpack.packb({"schema": [1], "job_id": "j", "attempt": 1}),
        msgpack.packb({"schema": codec.SCHEMA, "job_id": msgpack.ExtType(1, b"x"), "attempt": 1}),
    ],
    ids=[
        "empty",
        "reserved byte",
        "not a map",
        "no schema",
        "newer schema",
        "integer key",
        "claims 4 G entries",
        "schema is a list",
        "a type of its own",
    ],
)
def test_what_is_no_message_is_refused_with_a_sentence(data: bytes) -> None:
    with pytest.raises(SchemaMismatch):
        codec.decode(CancelRows, data)


def test_a_control_message_stays_small() -> None:
    with pytest.raises(PayloadTooLarge, match="262144"):
        codec.encode(CancelRows(job_id="j" * codec.MAX_CONTROL_BYTES, attempt=1))
