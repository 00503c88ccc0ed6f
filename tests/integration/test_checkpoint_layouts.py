"""Layouts of checkpoints as they are published: 16-bit variants, shards, float8 with and without scales."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoModel
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from giornata.families import Family
from giornata.model_cards import digest, read_model_card
from giornata_denoiser import checkpoint
from giornata_denoiser.families.weights import open_network
from giornata_prepost.checkpoint import FAMILIES

CPU = torch.device("cpu")
WEIGHTS = ("model.safetensors", "diffusion_pytorch_model.safetensors")
Build = Callable[[Family], Path]


@pytest.fixture
def copied(tiny_checkpoint: Build, tmp_path: Path) -> Build:
    """A checkpoint of a family, to be changed."""

    def copy(family: Family) -> Path:
        return Path(shutil.copytree(tiny_checkpoint(family), tmp_path / "copy"))

    return copy


def halved(folder: Path, *, keep: bool) -> None:
    """Write all weights of a folder as its variant fp16."""
    for path in [path for path in folder.rglob("*.safetensors") if path.name in WEIGHTS]:
        save_file(
            {name: tensor.half() for name, tensor in load_file(path).items()},
            path.with_name(f"{path.stem}.fp16.safetensors"),
            metadata={"format": "pt"},
        )
        if not keep:
            path.unlink()


def network(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The weights that a denoiser has of a Flux checkpoint."""
    found: nn.Module = open_network(FluxTransformer2DModel, folder, "transformer", dtype=dtype, device=CPU)
    return found.state_dict()


@pytest.mark.parametrize("family", [Family.FLUX_FILL, Family.SDXL])
def test_a_folder_with_16_bit_variants_alone_is_loaded(copied: Build, family: Family) -> None:
    folder = copied(family)
    part = "unet" if family is Family.SDXL else "transformer"
    kind: Any = AutoModel
    wanted = {
        name: tensor.half().float()
        for name, tensor in kind.from_pretrained(str(folder), subfolder=part).state_dict().items()
    }
    halved(folder, keep=False)
    opened = checkpoint.load(folder, dtype=torch.float32, device=CPU)
    assert opened.preview_map is not None
    network: Any = opened.family.network
    found = getattr(network, part).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    images: Any = FAMILIES[family](folder, read_model_card(folder), CPU, torch.float32)
    encoder = images.text_encoder("text_encoder_2")
    assert all(torch.equal(weight, weight.half().float()) for weight in encoder.parameters())


def test_shards_of_a_variant_are_loaded(copied: Build) -> None:
    folder = copied(Family.FLUX_FILL)
    wanted = {name: tensor.half().float() for name, tensor in network(folder).items()}
    kind: Any = FluxTransformer2DModel
    model = kind.from_pretrained(str(folder), subfolder="transformer").half()
    shutil.rmtree(folder / "transformer")
    model.save_pretrained(folder / "transformer", variant="fp16", max_shard_size="100KB")
    assert len(list((folder / "transformer").glob("*.fp16-*.safetensors"))) > 1
    found = network(folder)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_weights_without_a_variants_name_come_first_and_others_change_no_digest(copied: Build) -> None:
    folder = copied(Family.FLUX_FILL)
    wanted, before = network(folder), digest(folder)
    halved(folder, keep=True)
    assert digest(folder) == before, "a download has them not"
    found = network(folder)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_variant_of_another_name_is_refused_by_it(copied: Build) -> None:
    folder = copied(Family.FLUX_FILL) / "transformer"
    (folder / WEIGHTS[1]).rename(folder / "diffusion_pytorch_model.non_ema.safetensors")
    with pytest.raises(ValueError, match=r"the variant non_ema alone; accepted: .* of fp16, bf16, fp32"):
        network(folder.parent)


def in_float8(
    folder: Path,
    scale: Callable[[Tensor], Tensor] | None,
    suffix: str = "scale_weight",
    kind: str = "blocks.",
) -> dict[str, Tensor]:
    """Write linear layers of a component in float8, and their scales beside them; what they stand for."""
    path = next(folder.glob("*.safetensors"))
    tensors, stands_for = load_file(path), {}
    for name, weight in list(tensors.items()):
        if kind not in name or not name.endswith(".weight") or weight.ndim != 2:
            stands_for[name] = weight
            continue
        factor = torch.ones(()) if scale is None else scale(weight)
        stored = (weight / factor.reshape(-1, 1)).to(torch.float8_e4m3fn)
        tensors[name] = stored
        stands_for[name] = stored.float() * factor.reshape(-1, 1)
        if scale is not None:
            layer = name.removesuffix(".weight")
            tensors[f"{layer}.{suffix}"] = factor
            tensors[f"{layer}.scale_input"] = torch.tensor(3.0)
    if scale is not None:
        tensors["scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    save_file(tensors, path, metadata={"format": "pt"})
    return stands_for


def one(weight: Tensor) -> Tensor:
    return weight.abs().max() / 448


def by_channel(weight: Tensor) -> Tensor:
    return (weight.abs().amax(1) / 448).clamp(min=1e-6)


@pytest.mark.parametrize(
    ("scale", "suffix", "dtype"),
    [
        (one, "scale_weight", torch.float32),
        (one, "scale", torch.bfloat16),
        (by_channel, "weight_scale", torch.float32),
        (lambda weight: by_channel(weight).unsqueeze(1), "weight_scale", torch.bfloat16),
    ],
)
def test_float8_is_multiplied_by_its_scales(
    copied: Build, scale: Callable[[Tensor], Tensor], suffix: str, dtype: torch.dtype
) -> None:
    folder = copied(Family.FLUX_FILL)
    exact = network(folder)
    wanted = in_float8(folder / "transformer", scale, suffix)
    assert any(not torch.equal(wanted[name], exact[name]) for name in wanted)
    found = network(folder, dtype)
    assert all(torch.equal(found[name], wanted[name].to(dtype)) for name in exact)


def test_float8_without_scales_is_loaded_as_it_is(copied: Build) -> None:
    folder = copied(Family.FLUX_FILL)
    wanted = in_float8(folder / "transformer", None)
    found = network(folder)
    assert all(torch.equal(found[name], wanted[name]) for name in found)


def test_a_text_encoder_in_float8_is_multiplied_too(copied: Build) -> None:
    folder = copied(Family.FLUX_FILL)
    wanted = in_float8(folder / "text_encoder_2", one, kind="encoder.block.")
    images: Any = FAMILIES[Family.FLUX_FILL](folder, read_model_card(folder), CPU, torch.float32)
    found = images.text_encoder("text_encoder_2").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items() if "block." in name)


def beside(folder: Path, name: str, tensor: Tensor) -> str:
    """Put a tensor beside the weights of a layer in float8."""
    in_float8(folder / "transformer", None)
    path = next((folder / "transformer").glob("*.safetensors"))
    layer = "transformer_blocks.0.attn.to_q"
    save_file(load_file(path) | {f"{layer}.{name}": tensor}, path, metadata={"format": "pt"})
    return layer


@pytest.mark.parametrize(
    ("name", "tensor", "told"),
    [
        (
            "weight_scale_inv",
            torch.ones(1, 1),
            "weight_scale_inv beside weights in float8; accepted: scale, ",
        ),
        (
            "scale_weight",
            torch.ones(7),
            r"to_q.scale_weight \(7,\) for weights .*; accepted: one number, or one",
        ),
        (
            "weight_scale",
            torch.ones(1, 128),
            r"to_q.weight_scale \(1, 128\) for weights torch.Size\(\[128, 128\]\); accepted: one number, or one",
        ),
        (
            "weight",
            torch.ones(128, 64, dtype=torch.int8),
            "to_q.weight as I8; accepted are weights as F64, F32",
        ),
    ],
)
def test_what_is_not_understood_beside_weights_is_refused_by_name(
    copied: Build, name: str, tensor: Tensor, told: str
) -> None:
    folder = copied(Family.FLUX_FILL)
    beside(folder, name, tensor)
    with pytest.raises(ValueError, match=told):
        network(folder)


@pytest.mark.parametrize("part", ["transformer", "text_encoder_2"])
def test_weights_that_were_saved_quantised_are_refused_by_name(copied: Build, part: str) -> None:
    folder = copied(Family.FLUX_FILL)
    path = folder / part / "config.json"
    quantised = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    path.write_text(json.dumps(json.loads(path.read_text()) | quantised))
    told = f"its {part} was saved quantised; received: bitsandbytes; accepted: weights in float32"
    for load in (read_model_card, lambda folder: checkpoint.load(folder, dtype=torch.float32, device=CPU)):
        with pytest.raises(ValueError, match=told):
            load(folder)
