"""What messages are made of: bitmaps, tensors, sizes of outputs, and errors with stable codes."""

from __future__ import annotations

import json
import pickle
import struct

import pytest
import torch
from pydantic import ValidationError

from giornata import tensors
from giornata.wire import codec
from giornata.wire.errors import (
    BY_CODE,
    ErrorBody,
    Failed,
    GiornataError,
    InputLost,
    InvalidField,
    MaskSizeMismatch,
    from_body,
)
from giornata.wire.jobs import Box, Inspection
from giornata.wire.values import CellMap
from tests.contract.messages import INSPECTION

CELLS = CellMap(height=3, width=4, bits=b"\x84\x20")


def test_a_bitmap_counts_its_cells() -> None:
    assert CELLS.count == 3
    assert CellMap(height=1, width=8, bits=b"\x00").count == 0


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"bits": b"\x84"}, "3x4 cells take 2 bytes, not 1"),
        ({"bits": b"\x84\x20\x00"}, "3x4 cells take 2 bytes, not 3"),
        ({"bits": b"\x84\x21"}, "a bit after the last cell is set"),
        ({"height": 0, "bits": b""}, "greater than or equal to 1"),
    ],
)
def test_a_bitmap_that_does_not_hold_every_cell_is_refused(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        CellMap.model_validate({"height": 3, "width": 4, **fields})


def test_a_compute_set_travels_by_grain() -> None:
    inspection = INSPECTION.model_copy(
        update={"compute_set": {1: CELLS, 2: CellMap(height=1, width=1, bits=b"\x80")}}
    )
    data = codec.encode(inspection)
    assert set(codec.unpack(data)["compute_set"]) == {"1", "2"}
    assert codec.decode(Inspection, data) == inspection
    assert Inspection.model_validate(json.loads(inspection.model_dump_json())) == inspection


# Tensors as bytes: what is packed is unpacked, and what is no tensors is refused.


def test_tensors_come_back_with_dtype_shape_and_values() -> None:
    given = {
        "f": torch.randn(3, 4),
        "b": torch.randn(2, 2).to(torch.bfloat16),
        "u": torch.arange(6, dtype=torch.uint8).reshape(2, 3).T,  # not contiguous
        "n": torch.tensor(2.0, requires_grad=True),
    }
    back = tensors.unpack(tensors.pack(given))
    assert set(back) == set(given)
    for name, tensor in given.items():
        assert back[name].dtype is tensor.dtype
        assert torch.equal(back[name], tensor.detach())


@pytest.mark.parametrize(
    ("mask", "padding"),
    [([1, 1, 0, 0], 2), ([1, 1, 1], 0), ([0, 1, 0], 1), ([0, 0, 0], 2), ([1], 0), ([0], 0)],
)
def test_padding_is_what_follows_the_last_token_of_a_prompt(mask: list[int], padding: int) -> None:
    """One token at least is none: a sequence without any text is no sequence."""
    assert tensors.padding_tokens(torch.tensor(mask)) == padding
    assert tensors.padding_tokens(None) == 0


WHOLE = tensors.pack({"x": torch.zeros(8)})
LATER = b'{"x":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}'


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 8,
        WHOLE[:-1],
        WHOLE[: len(WHOLE) // 2],
        b"\xff" * len(WHOLE),
        struct.pack("<Q", len(LATER)) + LATER + b"\x00" * 4,
        pickle.dumps({"x": 1}),
    ],
    ids=["empty", "no header", "one byte short", "half", "a huge header", "unknown dtype", "pickle"],
)
def test_what_is_no_tensors_is_an_input_that_was_lost(data: bytes) -> None:
    with pytest.raises(InputLost, match="does not hold tensors"):
        tensors.unpack(data)


# What an inspection says of the output.


@pytest.mark.parametrize(
    ("crop", "output", "box"),
    [
        (None, (64, 48), (0, 0, 64, 48)),
        (None, (640, 480), (0, 0, 640, 480)),
        ((8, 4, 48, 40), (64, 48), (8, 4, 48, 40)),
        ((8, 4, 48, 40), (128, 96), (16, 8, 96, 80)),
        ((9, 5, 3, 3), (32, 24), (4, 2, 2, 2)),
        ((1, 1, 1, 1), (6, 4), (0, 0, 1, 1)),
    ],
)
def test_the_box_that_is_painted_is_in_pixels_of_the_output(
    crop: Box | None, output: tuple[int, int], box: Box
) -> None:
    changes = {"crop": crop, "output_width": output[0], "output_height": output[1]}
    assert INSPECTION.model_copy(update=changes).painted_box == box


# The error tree: stable codes, one class per code, nothing lost on the way.


CODES = {
    "attempts_exhausted",
    "bad_request",
    "batch_queue_full",
    "blob_store_full",
    "concurrency_limit_exceeded",
    "cross_site",
    "deadline_exceeded",
    "error",
    "failed",
    "idempotency_key_reused",
    "image_timeout",
    "image_unreadable",
    "input_lost",
    "interactive_queue_full",
    "intermediate_lost",
    "internal_error",
    "invalid_field",
    "job_cancelled",
    "malformed_message",
    "job_not_finished",
    "job_not_found",
    "mask_empty",
    "mask_rejected",
    "mask_size_mismatch",
    "model_not_found",
    "not_permitted",
    "not_supported",
    "overloaded",
    "payload_too_large",
    "queue_full",
    "rate_limit_exceeded",
    "result_expired",
    "row_poisoned",
    "schema_mismatch",
    "service_unavailable",
    "size_mismatch",
    "store_full",
    "template_limit",
    "template_mismatch",
    "template_not_found",
    "tenant_queue_full",
    "too_many_pixels",
    "too_many_requests",
    "unauthorized",
    "unknown_field",
    "unsupported_image_format",
}


def test_codes_are_stable() -> None:
    assert set(BY_CODE) >= CODES, "a code that clients know was renamed or removed"


def test_every_error_has_a_code_and_a_sentence_of_its_own() -> None:
    def tree(kind: type[GiornataError]) -> list[type[GiornataError]]:
        return [kind] + [leaf for child in kind.__subclasses__() for leaf in tree(child)]

    kinds = tree(GiornataError)
    assert len({kind.code for kind in kinds}) == len(kinds)
    for kind in kinds:
        assert kind().message.endswith("."), kind
        assert 400 <= kind.status <= 599


@pytest.mark.parametrize("kind", BY_CODE.values(), ids=lambda kind: kind.code)
def test_an_error_survives_the_wire_and_the_image_processes(kind: type[GiornataError]) -> None:
    error = kind("what happened", field="mask", received=3, accepted="4", retry_after_s=1.5)
    for back in (from_body(error.body()), pickle.loads(pickle.dumps(error))):  # noqa: S301 - what multiprocessing does
        assert type(back) is kind
        assert back.body() == error.body()


def test_a_code_of_a_newer_version_is_still_an_error() -> None:
    error = from_body(ErrorBody(code="moon_phase", message="The moon is wrong."))
    assert type(error) is Failed
    assert str(error) == "The moon is wrong."


def test_the_text_says_what_was_received_and_what_is_accepted() -> None:
    error = MaskSizeMismatch(received="10x20", accepted="20x10")
    assert str(error) == "The mask's aspect ratio differs from the image's. Received: 10x20. Accepted: 20x10."


def test_no_error_outgrows_a_message_whatever_it_is_about() -> None:
    huge = "x" * 1_000_000
    error = InvalidField(huge, field=huge, received=huge, accepted=huge)
    assert len(codec.encode(error.body())) < 10_000
    assert len(error.received or "") == 200
