"""Tensors as bytes: what is packed is unpacked, and what is no tensors is refused."""

from __future__ import annotations

import pickle
import struct

import pytest
import torch

from giornata import tensors
from giornata.wire.errors import InputLost


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
