"""Namings by families: canonical files have the products that a file means, and diffusers' own where it reads it."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Final
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from giornata.families import Family
from giornata.wire.errors import LoraMismatch, LoraNotSupported
from giornata_lora_store.validation import LoraSizeLimits, inspect_file
from giornata_prepost.loras import normalisation
from giornata_prepost.loras.normalisation import CheckpointModules, normalise
from tests.integration.prepost.loras import namings, oracle
from tests.integration.prepost.loras.namings import Changes, applied

Checkpoint = Callable[[Family], Path]
modules_of = cache(CheckpointModules)
"""The modules of a folder, which are built once."""


@pytest.fixture(autouse=True, scope="module")
def _modules_are_built_once() -> Iterator[None]:
    with mock.patch.object(normalisation, "CheckpointModules", modules_of):
        yield


@pytest.fixture(scope="module")
def loaded(tiny_checkpoint: Checkpoint) -> Callable[[str, Mapping[str, Tensor], Path], Changes]:
    """What diffusers loads of a file into the network of a family's pipeline."""

    def load(family: str, tensors: Mapping[str, Tensor], scratch: Path) -> Changes:
        pipeline, file = oracle.loaded(tiny_checkpoint(Family(family))), scratch / "theirs.safetensors"
        save_file({name: one.contiguous() for name, one in tensors.items()}, file)
        with warnings.catch_warnings():  # of Chroma: names of its layers are ends of others
            warnings.filterwarnings("ignore", "While injecting the PEFT adapters", RuntimeWarning)
            pipeline.load_lora_weights(scratch, weight_name=file.name)
        network = getattr(pipeline, oracle.network_of(pipeline))
        found = {path: applied(*factors) for path, factors in oracle.layers(network).items()}
        pipeline.unload_lora_weights()
        return found

    return load


Loaded = Callable[[str, Mapping[str, Tensor], Path], Changes]
LIMITS: Final = LoraSizeLimits(rank=256, tensors=4096)
"""As the LoRA store looks at a file before prepost does."""


def normalised(tensors: Mapping[str, Tensor], folder: Path, scratch: Path) -> Changes:
    """The changes that the canonical file of a source means."""
    save_file({name: one.contiguous() for name, one in tensors.items()}, scratch / "source.safetensors")
    inspect_file(scratch / "source.safetensors", LIMITS)
    normalise(scratch / "source.safetensors", scratch / "canonical", folder, {})
    found = load_file(scratch / "canonical")
    paths = [name.removesuffix(".down") for name in found if name.endswith(".down")]
    return {path: applied(found[f"{path}.down"], found[f"{path}.up"], 1.0) for path in paths}


def check_same(found: Changes, expected: Changes) -> None:
    assert sorted(found) == sorted(expected)
    for path, change in expected.items():
        torch.testing.assert_close(found[path], change, rtol=1e-5, atol=1e-5, msg=path)


@pytest.mark.parametrize(("family", "naming"), list(namings.all_cases()))
def test_each_naming_means_the_same_products_as_in_diffusers(
    family: str, naming: str, tiny_checkpoint: Checkpoint, loaded: Loaded, tmp_path: Path
) -> None:
    """Where diffusers reads the naming, it has the same products of the modules that it reads."""
    folder = tiny_checkpoint(Family(family))
    modules = modules_of(folder)
    tensors, expected = namings.file_of(family, naming, modules.network, modules.network_name)
    found = normalised(tensors, folder, tmp_path)
    check_same(found, expected)
    if (family, naming) in namings.READ_BY_DIFFUSERS:
        theirs = loaded(family, tensors, tmp_path)
        assert theirs
        check_same({path: found[path] for path in theirs}, theirs)


@pytest.fixture(scope="session")
def wide_flux(tiny_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Flux as wide as the published one, without weights: the converters that split `linear1` know this width alone."""
    folder = tmp_path_factory.mktemp("wide-flux")
    tiny = tiny_checkpoint(Family.FLUX_INPAINT)
    shutil.copy(tiny / "model_index.json", folder)
    shutil.copytree(
        tiny / "text_encoder", folder / "text_encoder", ignore=shutil.ignore_patterns("*.safetensors")
    )
    config = json.loads((tiny / "transformer" / "config.json").read_text())
    config |= {"num_attention_heads": 24, "attention_head_dim": 128, "num_layers": 2, "num_single_layers": 2}
    (folder / "transformer").mkdir()
    (folder / "transformer" / "config.json").write_text(json.dumps(config | {"axes_dims_rope": [16, 56, 56]}))
    return folder


LINEAR1: Final = {
    "single_blocks.0.linear1": tuple(
        f"single_transformer_blocks.0.{name}" for name in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
    )
}


@pytest.mark.parametrize("naming", namings.ORIGINAL_NAMINGS)
def test_the_published_flux_is_read_in_each_naming_of_its_original(
    naming: str, wide_flux: Path, tmp_path: Path
) -> None:
    modules = modules_of(wide_flux)
    names = {**namings.ORIGINAL["flux-inpaint"], **LINEAR1}
    lora = namings.trained(modules.network, names, namings.ORIGINAL_SWAPPED["flux-inpaint"])
    how = namings.ORIGINAL_NAMINGS[naming]
    tensors = namings.written(lora, how, "transformer")
    found = normalised(tensors, wide_flux, tmp_path)
    check_same(found, namings.changes(lora, scaled=how.alphas))
    if ("flux-inpaint", naming) in namings.READ_BY_DIFFUSERS:  # its converter's factors count once
        state = modules.pipeline.lora_state_dict(dict(tensors))
        for name in (name for name in state if "lora_A" in name and name.startswith("transformer.")):
            change = applied(state[name], state[name.replace("lora_A", "lora_B")], 1.0)
            path = name.removeprefix("transformer.").removesuffix(".lora_A.weight")
            torch.testing.assert_close(found[path], change, rtol=1e-4, atol=1e-4, msg=path)


@pytest.mark.parametrize(
    "naming", ["ai-toolkit", "PEFT of the original", "ComfyUI", "original, bare", "kohya"]
)
def test_embedders_of_flux2_count_where_diffusers_reads_them(
    naming: str, tiny_checkpoint: Checkpoint, loaded: Loaded, tmp_path: Path
) -> None:
    """Its converter of kohya's names knows none of them: such a file is refused by their names.

    Files that diffusers reads in no spelling of their own are read as ai-toolkit's.
    """
    folder = tiny_checkpoint(Family.FLUX2)
    lora = namings.trained(
        modules_of(folder).network, {**namings.ORIGINAL["flux2"], **namings.FLUX2_EMBEDDERS}
    )
    how = namings.ORIGINAL_NAMINGS[naming]
    tensors = namings.written(lora, how, "transformer")
    if naming == "kohya":
        with pytest.raises(LoraNotSupported, match="lora_unet_double_stream_modulation_img_lin"):
            normalised(tensors, folder, tmp_path)
        return
    found = normalised(tensors, folder, tmp_path)
    check_same(found, namings.changes(lora, scaled=how.alphas))
    if ("flux2", naming) in namings.READ_BY_DIFFUSERS:
        check_same(found, loaded("flux2", tensors, tmp_path))


@pytest.mark.parametrize(("naming", "rank"), [("bare, with alphas", 32), ("PEFT, default", 4)])
def test_lightning_loras_of_qwen_image_edit_plus_mean_what_diffusers_takes_them_for(
    naming: str, rank: int, tiny_checkpoint: Checkpoint, loaded: Loaded, tmp_path: Path
) -> None:
    """Those of 2509 and 2511 have factors for every layer of the blocks."""
    folder, how = tiny_checkpoint(Family.QWEN_IMAGE_EDIT_PLUS), namings.OWN_NAMINGS[naming]
    lora = namings.trained(modules_of(folder).network, namings.LIGHTNING, rank=rank)
    tensors = namings.written(lora, how, "transformer")
    found = normalised(tensors, folder, tmp_path)
    check_same(found, namings.changes(lora, scaled=how.alphas))
    check_same(found, loaded("qwen-image-edit-plus", tensors, tmp_path))


XLABS: Final = {
    **{
        f"double_blocks.{i}.processor.qkv_lora1": f"transformer_blocks.{i}.attn.to_q to_k to_v"
        for i in (0, 1)
    },
    "double_blocks.0.processor.qkv_lora2": "transformer_blocks.0.attn.add_q_proj add_k_proj add_v_proj",
    "double_blocks.0.processor.proj_lora1": "transformer_blocks.0.attn.to_out.0",
    "double_blocks.1.processor.proj_lora2": "transformer_blocks.1.attn.to_add_out",
    "single_blocks.0.processor.qkv_lora": "single_transformer_blocks.0.attn.to_q to_k to_v",
    "single_blocks.1.processor.proj_lora": "single_transformer_blocks.1.proj_out",
}


@pytest.mark.parametrize("prefix", ["", "diffusion_model."])
def test_an_xlabs_file_means_what_diffusers_takes_it_for(
    prefix: str, tiny_checkpoint: Checkpoint, loaded: Loaded, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(Family.FLUX_INPAINT)
    names = {}
    for name, told in XLABS.items():
        first, *rest = told.split(" ")
        names[name] = (first, *(f"{first.rpartition('.')[0]}.{each}" for each in rest))
    lora = namings.trained(modules_of(folder).network, names)
    naming = namings.Naming(lambda name: prefix + name, (".down.weight", ".up.weight"), alphas=False)
    tensors = namings.written(lora, naming, "transformer")
    found = normalised(tensors, folder, tmp_path)
    check_same(found, namings.changes(lora, scaled=False))
    check_same(found, loaded("flux-inpaint", tensors, tmp_path))


@pytest.mark.parametrize(
    ("block", "parts"),
    [
        ("layers.0.attention.", ("to.q", "to.k", "to.v", "to_out.0")),
        ("diffusion_model.layers.0.attention.", ("to.q", "to.k", "to.v", "to_out.0")),
        ("lora_unet_layers_0_attention_", ("to_q", "to_k", "to_v", "to_out_0")),
    ],
)
def test_whole_projections_of_z_image_beside_their_parts_count_once(
    block: str, parts: tuple[str, ...], tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(Family.Z_IMAGE)
    sides = namings.KOHYA if "_attention" in block else namings.OLD
    names = {f"{block}{name}": (f"layers.0.attention.{name.replace('to.', 'to_')}",) for name in parts}
    own = {name.replace("to_out_0", "to_out.0"): module for name, module in names.items()}
    lora = namings.trained(
        modules_of(folder).network,
        {
            name: tuple(each.replace("to_out_0", "to_out.0") for each in module)
            for name, module in own.items()
        },
    )
    dotted = namings.Naming(lambda name: name.replace("to_out.0", parts[-1]), sides, alphas=False)
    tensors = namings.written(lora, dotted, "transformer")
    expected = namings.changes(lora, scaled=False)
    rows = tensors[block + parts[0] + sides[1]].shape[0]
    qkv, out = f"{block}qkv", f"{block}out"
    for whole, count in ((qkv, 3), (out, 1)):
        tensors |= {whole + sides[0]: torch.randn(4, 64), whole + sides[1]: torch.randn(count * rows, 4)}
    check_same(normalised(tensors, folder, tmp_path), expected)
    lacking = {name: one for name, one in tensors.items() if not name.startswith(block + parts[2])}
    with pytest.raises((LoraMismatch, LoraNotSupported), match=re.escape(qkv)):
        normalised(lacking, folder, tmp_path)


@pytest.mark.parametrize(
    ("family", "naming", "dtype", "shape"),
    [
        ("sdxl", "kohya", torch.int64, ()),
        ("flux-inpaint", "kohya", torch.float16, (1,)),
        ("flux2-klein", "ai-toolkit, with alphas", torch.int32, ()),
    ],
)
def test_alphas_are_numbers_of_any_type(
    family: str,
    naming: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    tiny_checkpoint: Checkpoint,
    tmp_path: Path,
) -> None:
    folder = tiny_checkpoint(Family(family))
    modules = modules_of(folder)
    tensors, expected = namings.file_of(family, naming, modules.network, modules.network_name)
    tensors |= {
        name: one.to(dtype).reshape(shape) for name, one in tensors.items() if name.endswith(".alpha")
    }
    check_same(normalised(tensors, folder, tmp_path), expected)


@pytest.mark.parametrize(
    ("family", "naming", "dtype"),
    [
        ("sd3", "kohya", torch.float8_e4m3fn),
        ("flux-inpaint", "ComfyUI", torch.float8_e5m2),
        ("z-image", "kohya", torch.bfloat16),
    ],
)
def test_small_dtypes_keep_their_values(
    family: str, naming: str, dtype: torch.dtype, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(Family(family))
    modules = modules_of(folder)
    tensors, _ = namings.file_of(family, naming, modules.network, modules.network_name)
    small = {name: one if name.endswith(".alpha") else one.to(dtype) for name, one in tensors.items()}
    found = normalised(small, folder, tmp_path)
    assert {one.dtype for one in load_file(tmp_path / "canonical").values()} == {torch.bfloat16}
    whole = normalised({name: one.float() for name, one in small.items()}, folder, tmp_path)
    for path, change in whole.items():
        bound = 2**-7 * change.abs().max().item()  # alpha / rank rounds the second factor to 8 bits
        torch.testing.assert_close(found[path], change, rtol=0, atol=bound, msg=path)


TEXT: Final = ["text_model.encoder.layers.0.self_attn.q_proj", "text_model.encoder.layers.0.mlp.fc1"]
TEXT_PARTS: Final = {
    ("sd", "lora_unet_", "lora_te_"): "text_encoder",
    ("sdxl", "lora_unet_", "lora_te1_"): "text_encoder",
    ("sdxl", "lora_unet_", "lora_te2_"): "text_encoder_2",
    ("sd3", "lora_unet_", "lora_te1_"): "text_encoder",
    ("sd3", "lora_transformer_", "lora_te2_"): "text_encoder_2",
    ("flux-inpaint", "lora_unet_", "lora_te1_"): "text_encoder",
    ("flux-inpaint", "lora_transformer_", "lora_te1_"): "text_encoder",
}


@pytest.mark.parametrize(("family", "prefix", "text"), TEXT_PARTS)
def test_text_parts_of_kohyas_and_onetrainers_files_are_read(
    family: str, prefix: str, text: str, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(Family(family))
    modules = modules_of(folder)
    part = TEXT_PARTS[family, prefix, text]
    own = prefix == "lora_transformer_" or family == "sd"
    lora = namings.trained(modules.network, namings.OWN[family] if own else namings.ORIGINAL[family],
                           () if own else namings.ORIGINAL_SWAPPED.get(family, ()))  # fmt: skip
    layers = {path.removeprefix("text_model."): path for path, _ in modules.parts[part].named_modules()}
    names = {name: (layers[name.removeprefix("text_model.")],) for name in TEXT}
    if "text_projection" in layers:
        names["text_projection"] = ("text_projection",)
    words = namings.trained(modules.parts[part], names)
    flat = partial(namings.written, network="transformer")
    tensors = flat(lora, namings.Naming(namings.flat(prefix), namings.KOHYA, alphas=True))
    tensors |= flat(words, namings.Naming(namings.flat(text), namings.KOHYA, alphas=True))
    expected = namings.changes(lora) | {f"{part}.{path}": one for path, one in namings.changes(words).items()}
    check_same(normalised(tensors, folder, tmp_path), expected)


@pytest.mark.parametrize("naming", ["ai-toolkit"])
def test_factors_of_zeros_need_no_module(naming: str, tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Some files of Flux have untrained factors for T5, which diffusers purges; alone, they are no LoRA."""
    folder = tiny_checkpoint(Family.FLUX_INPAINT)
    tensors, expected = namings.file_of("flux-inpaint", naming, modules_of(folder).network, "transformer")
    sides = namings.ORIGINAL_NAMINGS[naming].sides
    layer = "text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q"
    idle = {layer + sides[0]: torch.randn(4, 64), layer + sides[1]: torch.zeros(64, 4)}
    check_same(normalised(tensors | idle, folder, tmp_path), expected)
    with pytest.raises(LoraMismatch, match="t5xxl"):
        normalised(idle, folder, tmp_path)
    with pytest.raises((LoraMismatch, LoraNotSupported), match="t5xxl"):
        normalised(tensors | idle | {layer + sides[1]: torch.ones(64, 4)}, folder, tmp_path)


@pytest.mark.parametrize("naming", ["diffusers", "ai-toolkit", "kohya", "original, bare"])
def test_a_control_lora_is_refused_by_name(naming: str, wide_flux: Path, tmp_path: Path) -> None:
    network = modules_of(wide_flux).network
    own = naming == "diffusers"
    names = {"x_embedder": ("x_embedder",)} if own else {"img_in": ("x_embedder",)}
    how = namings.OWN_NAMINGS[naming] if own else namings.ORIGINAL_NAMINGS[naming]
    (lora,) = namings.trained(network, names)
    wider = replace(lora, down=torch.randn(4, 128))
    with pytest.raises(LoraNotSupported, match="Control LoRA") as raised:
        normalised(namings.written([wider], how, "transformer"), wide_flux, tmp_path)
    assert "x_embedder: 128 channels" in str(raised.value)
    assert "64" in str(raised.value)


@pytest.mark.parametrize(
    ("family", "name", "said"),
    [
        ("flux-inpaint", "lora_unet_input_blocks_4_1_proj_in", "FluxInpaintPipeline"),
        ("sdxl", "lora_unet_double_blocks_0_img_attn_qkv", "StableDiffusionXLInpaintPipeline"),
        ("qwen-image", "diffusion_model.double_blocks.0.img_attn.qkv", "QwenImageInpaintPipeline"),
        ("z-image", "transformer_blocks.0.attn.to_q", "ZImageInpaintPipeline"),
        ("sd3", "lora_unet_joint_blocks_9_x_block_attn_qkv", "StableDiffusion3InpaintPipeline"),
        ("flux2-klein", "lora_te1_text_model_encoder_layers_0_mlp_fc1", "Flux2KleinInpaintPipeline"),
        ("flux-inpaint", "text_encoders.t5xxl.transformer.encoder.block.0", "FluxInpaintPipeline"),
    ],
)
def test_what_another_model_has_is_refused_by_its_name(
    family: str, name: str, said: str, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    tensors = {name + namings.KOHYA[0]: torch.ones(4, 64), name + namings.KOHYA[1]: torch.ones(64, 4)}
    with pytest.raises(LoraMismatch, match=re.escape(name)) as raised:
        normalised(tensors, tiny_checkpoint(Family(family)), tmp_path)
    assert said in str(raised.value)
