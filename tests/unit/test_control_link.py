"""The data path of ControlNets: messages as bytes, places of a slab, and what a denoiser takes in."""

from __future__ import annotations

import contextlib
import struct

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from giornata.control.link import (
    MAX_MESSAGE_BYTES,
    MAX_OPENING_BYTES,
    ControlFailed,
    encode_frame,
    read_from_denoiser,
    read_from_instance,
)
from giornata.control.link.client import ControlStepHandle, ControlStepTable
from giornata.control.link.slabs import SlabAllocator, align_up
from giornata.frames import LENGTH, MalformedFrame, frame_length
from giornata.wire import codec
from giornata.wire.controlnets import ALIGNMENT_BYTES, CancelStep, Dtype, OpenLink, ResidualsRequest
from tests.contract.control_steps import CONTROL_STEPS
from tests.present import present

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
    memory = present(OPEN.memory)
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


# Places of a slab, against a model that looks at every unit of it.


UNITS = 12


class Model:
    """Which units of the slab are taken, one by one."""

    def __init__(self) -> None:
        self.owners: list[int | None] = [None] * UNITS

    def has_room(self, units: int) -> bool:
        return any(
            all(owner is None for owner in self.owners[start : start + units])
            for start in range(UNITS - units + 1)
        )

    def mark(self, offset: int, units: int, owner: int | None) -> None:
        start = offset // ALIGNMENT_BYTES
        before = {owner is not None for owner in self.owners[start : start + units]}
        assert before == {owner is None}, (
            "a place is taken where all is free, and given back where all is taken"
        )
        self.owners[start : start + units] = [owner] * units


@given(st.lists(st.tuples(st.booleans(), st.integers(1, UNITS * ALIGNMENT_BYTES + 1)), max_size=60))
def test_places_never_overlap_and_are_refused_only_where_no_gap_is_long_enough(
    turns: list[tuple[bool, int]],
) -> None:
    ring, model = SlabAllocator(UNITS * ALIGNMENT_BYTES), Model()
    held: list[tuple[int, int]] = []
    for number, (gives_back, size) in enumerate(turns):
        if gives_back and held:
            offset, units = held.pop(size % len(held))
            ring.give_back(offset)
            model.mark(offset, units, None)
            continue
        units, offset_or_none = align_up(size) // ALIGNMENT_BYTES, ring.take(size)
        assert (offset_or_none is not None) == model.has_room(units)
        if offset_or_none is not None:
            assert offset_or_none % ALIGNMENT_BYTES == 0
            assert 0 <= offset_or_none <= ring.size_bytes - size
            model.mark(offset_or_none, units, number)
            held.append((offset_or_none, units))
    for offset, _ in held:
        ring.give_back(offset)
    assert ring.take(ring.size_bytes) == 0, "all that was given back is one place again"


def test_what_is_no_place_is_refused() -> None:
    ring = SlabAllocator(1000)
    with pytest.raises(ValueError, match="at least one byte"):
        ring.take(0)
    ring.take(100)
    with pytest.raises(ValueError, match="byte 64"):
        ring.give_back(64)
    ring.give_back(0)
    with pytest.raises(ValueError, match="byte 0"):
        ring.give_back(0)


# What a denoiser knows of its steps: an instance's word is checked before anything is done about it.


SLAB_BYTES = 1 << 16
CANCELS: list[int] = []
"""Steps of which the instance is asked to let go."""


def asked(samples: int = 2) -> ResidualsRequest:
    sizes = (4,) * (samples + 1)
    return ResidualsRequest(
        number=0,
        row="r",
        step=0,
        level=0.5,
        whole=True,
        latents_dtype=Dtype.FLOAT32,
        dtype=Dtype.FLOAT32,
        offsets=(0,) * (samples + 1),
        tokens=sizes,
        channels=sizes,
    )


def entered(samples: int = 2) -> tuple[ControlStepTable, ControlStepHandle]:
    steps = ControlStepTable(torch.zeros(SLAB_BYTES, dtype=torch.uint8), 0.0, CANCELS.append)
    CANCELS.clear()
    return steps, steps.enter(asked(samples))


def free_bytes(steps: ControlStepTable) -> int:
    return SLAB_BYTES - sum(end - start for start, end in steps._places._taken)


@pytest.mark.parametrize(("number", "index"), [(0, 2), (0, 3), (0, 1 << 40), (1, 0), (1 << 40, 0)])
def test_a_sample_that_no_step_has_is_refused_before_it_is_taken_in(number: int, index: int) -> None:
    steps, step = entered()
    with pytest.raises(MalformedFrame):
        steps.expected(number, index)
    assert steps.expected(0, 1) is step


def test_a_sample_comes_once_and_none_after_the_last() -> None:
    steps, step = entered()
    steps.came(step, 1)
    after_one = step.under_way
    with pytest.raises(MalformedFrame):
        steps.expected(0, 1)
    steps.came(steps.expected(0, 0), 0)
    assert (after_one, step.under_way) == (True, False)
    with pytest.raises(MalformedFrame):
        steps.expected(0, 0)


def test_a_step_that_failed_gets_no_more_samples_and_keeps_what_came() -> None:
    steps, step = entered()
    steps.came(step, 0)
    steps.failed(0, "code", "message")
    with pytest.raises(MalformedFrame):
        steps.expected(0, 1)
    with pytest.raises(MalformedFrame):
        steps.failed(0, "code", "again")
    step.sample(0, 0.0)
    with pytest.raises(ControlFailed):
        step.sample(1, 0.0)


def test_a_place_is_free_once_nobody_writes_to_it() -> None:
    steps, step = entered()
    step.release()
    step.release()
    assert CANCELS == [0], "the instance is asked once"
    assert free_bytes(steps) < SLAB_BYTES
    assert steps.expected(0, 0) is step, "it may be on its way"
    steps.cancelled(0)
    assert free_bytes(steps) == SLAB_BYTES
    with pytest.raises(MalformedFrame):
        steps.cancelled(0)
    step = steps.enter(asked(1))
    steps.came(steps.expected(1, 0), 0)
    with pytest.raises(MalformedFrame):
        steps.cancelled(1)
    step.release()
    assert CANCELS == [0], "it had ended"
    assert free_bytes(steps) == SLAB_BYTES
