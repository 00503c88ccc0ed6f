"""Messages of the data path as bytes."""

from __future__ import annotations

import contextlib
import struct

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from giornata.control.link.messages import (
    MAX_MESSAGE_BYTES,
    MAX_OPENING_BYTES,
    encode_frame,
    read_from_denoiser,
    read_from_instance,
)
from giornata.frames import LENGTH, MalformedFrame, frame_length
from giornata.wire import codec
from giornata.wire.controlnets import CancelStep, OpenLink, ResidualsRequest
from tests.contract.control_steps import CONTROL_STEPS

ASK = next(each for each in CONTROL_STEPS if isinstance(each, ResidualsRequest))
OPEN = next(each for each in CONTROL_STEPS if isinstance(each, OpenLink))
DENOISERS = {"OpenLink", "ResidualsRequest", "CancelStep"}


@pytest.mark.parametrize("message", CONTROL_STEPS, ids=lambda each: type(each).__name__)
def test_every_message_is_read_as_it_was_by_its_reader_alone(message: BaseModel) -> None:
    data = encode_frame(message)
    assert frame_length(data[: LENGTH.size], MAX_MESSAGE_BYTES) == len(data) - LENGTH.size
    readers = [read_from_denoiser, read_from_instance]
    right, wrong = readers if type(message).__name__ in DENOISERS else reversed(readers)
    assert right(data[LENGTH.size :]) == message
    with pytest.raises(MalformedFrame, match=message.kind):
        wrong(data[LENGTH.size :])


def test_the_largest_messages_are_within_their_limits() -> None:
    largest = 2**48
    columns = {"offsets": (2**48 - 64,) * 257, "tokens": (2**14,) * 257, "channels": (2**14,) * 257}
    ask = {**ASK.model_dump(), **columns, "number": largest, "step": largest, "row": "x" * 512}
    assert len(encode_frame(ResidualsRequest.model_validate(ask))) <= MAX_MESSAGE_BYTES
    memory = OPEN.memory
    assert memory is not None
    full = memory.model_copy(update={"handle": b"x" * 4096, "event": b"x" * 1024, "counter": b"x" * 256})
    assert (
        len(encode_frame(OPEN.model_copy(update={"memory": full, "token": "x" * 256}))) <= MAX_OPENING_BYTES
    )


@pytest.mark.parametrize("length", [0, MAX_OPENING_BYTES + 1, 2**32 - 1])
def test_a_length_out_of_bounds_is_refused(length: int) -> None:
    with pytest.raises(MalformedFrame, match=f"{length} bytes; accepted: 1 to {MAX_OPENING_BYTES}"):
        frame_length(struct.pack("<I", length), MAX_OPENING_BYTES)


@given(st.binary(max_size=200))
def test_bytes_are_a_message_or_malformed(data: bytes) -> None:
    for read in (read_from_denoiser, read_from_instance):
        with contextlib.suppress(MalformedFrame):
            read(data)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.sampled_from(CONTROL_STEPS), st.data())
def test_fields_of_any_value_are_a_message_or_malformed(message: BaseModel, data: st.DataObject) -> None:
    fields = codec.unpack(encode_frame(message)[LENGTH.size :])
    field = data.draw(st.sampled_from(sorted(fields)))
    changed = msgpack.packb({**fields, field: data.draw(VALUES)})
    for read in (read_from_denoiser, read_from_instance):
        with contextlib.suppress(MalformedFrame):
            read(changed)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": "float64"}, "dtype"),
        ({"offsets": (0, 1000)}, "no multiple of 64"),
        ({"offsets": (0, -64)}, "offsets"),
        ({"offsets": (0,)}, "differ in number"),
        ({"tokens": (4, 0)}, "tokens"),
        ({"tokens": (2**20, 2), "channels": (2**20, 128)}, "more than"),
        ({"offsets": (), "tokens": (), "channels": ()}, "tokens"),
        (dict.fromkeys(("offsets", "tokens", "channels"), (64,) * 300), "offsets"),
        ({"level": float("nan")}, "level"),
        ({"row": "x" * 513}, "row"),
        ({"step": -1}, "step"),
    ],
)
def test_a_step_that_makes_no_sense_is_refused(change: dict[str, object], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        ResidualsRequest.model_validate({**ASK.model_dump(), **change})


@pytest.mark.parametrize(
    ("offsets", "slab_bytes", "fits"),
    [
        ((0, 1024), 1536, True),  # latents of 1024 bytes, a sample of 512
        ((0, 1024), 1535, False),
        ((512, 0), 1536, True),
        ((512, 64), 1536, False),
        ((0, 960), 4096, False),
        ((0, 2**48), 4096, False),
    ],
)
def test_places_lie_in_the_slab_and_apart(offsets: tuple[int, int], slab_bytes: int, fits: bool) -> None:
    ask = ResidualsRequest.model_validate({**ASK.model_dump(), "offsets": offsets})
    assert ask.sizes_bytes == (1024, 512)
    assert ask.fits(slab_bytes) is fits


def test_an_older_schema_is_told_apart() -> None:
    data = msgpack.packb({**CancelStep(number=1).model_dump(), "schema": codec.SCHEMA + 1})
    with pytest.raises(MalformedFrame, match="schema"):
        read_from_denoiser(data)


def test_a_token_is_never_shown() -> None:
    secret = "do-not-show"  # noqa: S105 - that is what is tested
    opening = OPEN.model_copy(update={"token": secret})
    assert secret not in repr(opening)
    fields = codec.unpack(encode_frame(opening)[LENGTH.size :])
    for change in ({"path": "carrier pigeon"}, {"token": [secret]}, {"schema": 9}):
        with pytest.raises(MalformedFrame) as refused:
            read_from_denoiser(msgpack.packb({**fields, **change}))
        assert secret not in str(refused.value)
