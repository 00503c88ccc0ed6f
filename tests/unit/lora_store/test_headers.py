"""Which headers are LoRAs: styles by their names, and everything else refused by name."""

from __future__ import annotations

import pytest

from giornata.wire.errors import LoraNotSupported, LoraTooLarge
from giornata.wire.loras import LoraStyle
from giornata_lora_store.headers import (
    LoraSizeLimits,
    TensorInfo,
    recognise_header,
)
from giornata_lora_store.shared_folder import shared_file
from tests.present import present

LIMITS = LoraSizeLimits(rank=64, tensors=100)
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
