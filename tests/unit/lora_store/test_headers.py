"""Which files are LoRAs: styles by the names in headers, and everything else refused by name."""

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
from giornata.wire.errors import GiornataError, LoraNotSupported, LoraTooLarge, LoraUnreadable
from giornata.wire.loras import LoraStyle
from giornata_lora_store.endpoints import shared_file
from giornata_lora_store.validation import (
    LoraHeader,
    LoraSizeLimits,
    TensorInfo,
    inspect_file,
    recognise_header,
)
from tests.examples import examples
from tests.present import present

LIMITS: Final = LoraSizeLimits(rank=64, tensors=100, header_bytes=4096)
STYLES = {
    LoraStyle.DIFFUSERS: ("transformer.blocks.0.attn.to_q.lora_A.weight", ".lora_B.weight"),
    LoraStyle.PEFT: ("all_x_embedder.2-1.lora_A.default.weight", ".lora_B.default.weight"),
    LoraStyle.KOHYA: ("lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight", ".lora_up.weight"),
    LoraStyle.XLABS: ("double_blocks.0.processor.qkv_lora1.down.weight", ".up.weight"),
    LoraStyle.ORIGINAL: ("diffusion_model.layers.0.attention.to_q.lora_A.weight", ".lora_B.weight"),
}


NAMES = ["unet.a.lora_A.weight", "unet.a.lora_B.weight", "unet.a.alpha"]


def pair(down: str, up: str, rank: int = 4, dtype: str = "BF16") -> dict[str, TensorInfo]:
    stem = down
    for end in (
        ".lora_A.default.weight",
        ".lora_A.weight",
        ".lora_down.weight",
        ".lora.down.weight",
        ".down.weight",
    ):
        stem = stem.removesuffix(end) if stem == down else stem
    return {down: TensorInfo(dtype, (rank, 16)), stem + up: TensorInfo(dtype, (24, rank))}


@pytest.mark.parametrize("style", STYLES)
def test_a_style_is_told_by_its_names(style: LoraStyle) -> None:
    found = recognise_header(pair(*STYLES[style]), LIMITS)
    assert (found.style, found.rank, found.modules) == (style, 4, 1)


def test_diffusers_older_names_and_alphas_are_known() -> None:
    old = pair("unet.up_blocks.0.attn1.to_q.lora.down.weight", ".lora.up.weight")
    alpha = {"unet.up_blocks.0.attn1.to_q.alpha": TensorInfo("F32", ())}
    assert recognise_header(old | alpha, LIMITS).style is LoraStyle.DIFFUSERS
    two = {f"double_blocks.0.processor.qkv_lora{i}.{side}.weight": TensorInfo("F32", shape)
           for i in (1, 2) for side, shape in (("down", (4, 8)), ("up", (24, 4)))}  # fmt: skip
    assert recognise_header(two, LIMITS).modules == 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lora_unet_x.dora_scale", "DoRA"),
        ("transformer.x.lora_magnitude_vector", "DoRA"),
        ("lora_unet_x.lokr_w1", "LoKr"),
        ("lora_unet_x.hada_w1_a", "LoHa"),
        ("lora_unet_x.lora_mid.weight", "middle factor"),
        ("transformer.x.lora_B.bias", "biases"),
        ("lora_unet_x.diff", "whole differences"),
        ("clip_l", "textual inversion"),
        ("transformer.x.weight", "no factor"),
        ("../../etc/passwd", "name that no module has"),
        ("lora_unet_stray.alpha", "belongs to no module"),
    ],
)
def test_what_is_no_plain_lora_is_refused_by_name(name: str, said: str) -> None:
    tensors = pair(*STYLES[LoraStyle.DIFFUSERS]) | {name: TensorInfo("F32", (1,))}
    with pytest.raises(LoraNotSupported, match=said) as raised:
        recognise_header(tensors, LIMITS)
    assert raised.value.code == "lora_not_supported"
    assert name.removesuffix(".alpha") in present(raised.value.received)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"down": None}, "one factor and not two"),
        ({"down": TensorInfo("F32", (5, 16))}, "different ranks"),
        ({"down": TensorInfo("I64", (4, 16))}, "dtype"),
        ({"down": TensorInfo("F32", (4,))}, "no matrix"),
        ({"down": TensorInfo("F32", (4, 0))}, "no matrix"),
        ({"alpha": TensorInfo("F32", (3,))}, "not one number"),
        ({"alpha": TensorInfo("BOOL", ())}, "dtype"),
    ],
)
def test_factors_that_do_not_fit_are_refused(changes: dict[str, TensorInfo | None], said: str) -> None:
    names = {"down": "unet.a.lora_A.weight", "up": "unet.a.lora_B.weight", "alpha": "unet.a.alpha"}
    whole = {
        "down": TensorInfo("F32", (4, 16)),
        "up": TensorInfo("F32", (24, 4)),
        "alpha": TensorInfo("F32", ()),
    }
    tensors = {names[name]: tensor for name, tensor in (whole | changes).items() if tensor is not None}
    with pytest.raises(LoraNotSupported, match=said):
        recognise_header(tensors, LIMITS)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
@pytest.mark.parametrize("alpha", [TensorInfo("I64", ()), TensorInfo("I32", (1,)), TensorInfo("F64", (1,))])
def test_factors_may_be_small_and_alphas_whole_numbers(dtype: str, alpha: TensorInfo) -> None:
    tensors = pair(*STYLES[LoraStyle.KOHYA], dtype=dtype)
    found = recognise_header(tensors | {"lora_unet_double_blocks_0_img_attn_qkv.alpha": alpha}, LIMITS)
    assert found.modules == 1


@pytest.mark.parametrize("name", ["double_blocks.1000.img_attn.qkv", "lora_unet_double_blocks_99999999_x"])
def test_no_name_makes_a_converter_count_for_ever(name: str) -> None:
    with pytest.raises(LoraNotSupported, match="name that no module has"):
        recognise_header(pair(f"{name}.lora_A.weight", ".lora_B.weight"), LIMITS)


@pytest.mark.parametrize(
    "name",
    ["double_blocks.0.img_attn.norm.key_norm.scale", "transformer.transformer_blocks.0.attn.norm_q.weight"],
)
def test_a_control_lora_is_told_whatever_else_it_holds(name: str) -> None:
    tensors = pair("img_in.lora_A.weight", ".lora_B.weight") | {
        "img_in.lora_B.bias": TensorInfo("F32", (24,))
    }
    with pytest.raises(LoraNotSupported, match="Control LoRA") as raised:
        recognise_header(tensors | {name: TensorInfo("F32", (16,))}, LIMITS)
    assert raised.value.received == name


def test_rank_and_number_have_limits() -> None:
    with pytest.raises(LoraTooLarge, match="rank 65"):
        recognise_header(pair(*STYLES[LoraStyle.PEFT], rank=65), LIMITS)
    with pytest.raises(LoraTooLarge, match="101 tensors"):
        recognise_header({f"x{i}": TensorInfo("F32", (1,)) for i in range(101)}, LIMITS)
    with pytest.raises(LoraNotSupported, match="no factors"):
        recognise_header({}, LIMITS)


@pytest.mark.parametrize(
    ("folder", "file"),
    [
        ("..", "x.safetensors"),
        ("m", "../x.safetensors"),
        ("m", ".safetensors"),
        ("m", "x.ckpt"),
        ("m/n", "x.safetensors"),
        ("m", "x\n.safetensors"),
        (".hidden", "x.safetensors"),
    ],
)
def test_names_that_lead_elsewhere_are_no_shared_paths(folder: str, file: str) -> None:
    assert shared_file(folder, file) is None


def test_a_shared_path_names_model_and_lora() -> None:
    found = present(shared_file("FLUX.1-dev", "outlined_v2.safetensors"))
    assert (found.model, found.name) == ("FLUX.1-dev", "outlined_v2")


# Whatever bytes come as a LoRA, the store recognises one or refuses them with a code.


NAME: Final = "transformer.blocks.0.attn.to_q"
WHOLE: Final = save(
    {f"{NAME}.lora_A.weight": np.ones((4, 16), "f4"), f"{NAME}.lora_B.weight": np.ones((24, 4), "f4")}
)
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
