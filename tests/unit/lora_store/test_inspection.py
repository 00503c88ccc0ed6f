"""Whatever bytes come as a LoRA, the store recognises one or refuses them with a code."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.numpy import save

from giornata.wire import codec
from giornata.wire.errors import GiornataError, LoraTooLarge, LoraUnreadable
from giornata_lora_store.headers import LoraHeader, LoraSizeLimits, inspect_file
from tests.examples import examples

NAME: Final = "transformer.blocks.0.attn.to_q"
WHOLE: Final = save(
    {f"{NAME}.lora_A.weight": np.ones((4, 16), "f4"), f"{NAME}.lora_B.weight": np.ones((24, 4), "f4")}
)
LIMITS: Final = LoraSizeLimits(rank=64, tensors=100, header_bytes=4096)
CODES: Final = {"lora_unreadable", "lora_not_supported", "lora_too_large"}
LONGEST: Final = 4096
"""Most bytes of an answer with an error: it goes through NATS and HTTP headers of every kind of client."""

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=6,
)
sizes = st.integers(-1, 40) | st.sampled_from([2**31, 2**53, 2**63, 2**64, 10**30])
tensors = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F16", "BF16", "F64", "I64", "BOOL", "F8_E4M3", "F4", ""]) | values,
        "shape": st.lists(sizes, max_size=4) | values,
        "data_offsets": st.lists(sizes, min_size=2, max_size=2) | values,
    },
)
names = st.sampled_from(
    [f"{NAME}.lora_A.weight", f"{NAME}.lora_B.weight", f"{NAME}.alpha", "__metadata__", "../../etc/passwd"]
) | st.text(max_size=30)
headers = st.dictionaries(names, tensors | values, max_size=5)


def inspected(folder: Path, data: bytes) -> LoraHeader | None:
    """What the file is; None where it is refused as it should be."""
    found = _inspected(folder / "file", data)
    if isinstance(found, LoraHeader):
        return found
    assert found.code in CODES
    assert len(codec.encode(found.body())) < LONGEST
    return None


def _inspected(path: Path, data: bytes) -> LoraHeader | GiornataError:
    path.write_bytes(data)
    try:
        return inspect_file(path, LIMITS)
    except GiornataError as error:
        return error


def with_header(text: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text + data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("headers")


@examples(times=2)  # most changed bytes are refused at once
@given(header=headers, data=st.binary(max_size=64))
@example(header={"\ud800": {}}, data=b"")
@example(header={"x" * 3000: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, data=bytes(4))
def test_any_header_is_a_lora_or_refused_with_a_code(
    folder: Path, header: dict[str, Any], data: bytes
) -> None:
    inspected(folder, with_header(json.dumps(header).encode(), data))


@examples(times=2)  # as above
@given(
    place=st.integers(0, len(WHOLE)),
    length=st.integers(0, 40),
    instead=st.binary(max_size=40),
)
def test_a_file_with_other_bytes_in_it_is_a_lora_or_refused_with_a_code(
    folder: Path, place: int, length: int, instead: bytes
) -> None:
    found = inspected(folder, WHOLE[:place] + instead + WHOLE[place + length :])
    assert found is None or 0 < found.rank <= LIMITS.rank


def factors(*offsets: tuple[int, int]) -> bytes:
    """A file whose two factors lie at these offsets, in 640 bytes."""
    shapes = {"lora_A": (4, 16), "lora_B": (24, 4)}
    listed = {
        f"{NAME}.{side}.weight": {"dtype": "F32", "shape": shape, "data_offsets": where}
        for (side, shape), where in zip(shapes.items(), offsets, strict=True)
    }
    return with_header(json.dumps(listed).encode(), bytes(640))


@pytest.mark.parametrize(
    "offsets",
    [
        pytest.param(((0, 256), (128, 512)), id="overlapping"),
        pytest.param(((0, 256), (0, 384)), id="inside"),
        pytest.param(((0, 256), (260, 644)), id="a hole, beyond the end"),
        pytest.param(((0, 256), (256, 636)), id="shorter than its shape"),
        pytest.param(((256, 0), (256, 640)), id="backwards"),
    ],
)
def test_tensors_that_do_not_lie_side_by_side_are_unreadable(
    folder: Path, offsets: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    assert inspected(folder, factors((0, 256), (256, 640))) is not None, "side by side"
    (folder / "file").write_bytes(factors(*offsets))
    with pytest.raises(LoraUnreadable):
        inspect_file(folder / "file", LIMITS)


def test_many_names_are_looked_through_once(folder: Path) -> None:
    """The last of many is given twice; comparing each with all would take minutes."""
    count = 50_000
    empty = b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    text = b"{" + b",".join(empty % number for number in (*range(count), count - 1)) + b"}"
    (folder / "file").write_bytes(with_header(text))
    limits = replace(LIMITS, tensors=2 * count, header_bytes=len(text))
    with pytest.raises(LoraUnreadable, match=f"'{count - 1}' is given twice"):
        inspect_file(folder / "file", limits)
    limits = replace(limits, tensors=count // 2)
    with pytest.raises(LoraTooLarge, match=f"{10 * count + 10} quotes"):
        inspect_file(folder / "file", limits)
    with pytest.raises(LoraTooLarge, match="header"):
        inspect_file(folder / "file", LIMITS)
