"""Files in every naming that people's LoRAs have, with the products that they mean.

A LoRA is made of random factors and an alpha for each of some modules; the same LoRA is written in each naming. A
module of the original checkpoint that diffusers has in several parts gets one pair, whose second factor is split by
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

RANK: Final = 4
PROBES: Final = 4


@dataclass(frozen=True)
class Trained:
    """The factors of one module, under its name in the file's checkpoint."""

    name: str
    modules: tuple[str, ...]
    """In diffusers; several share the rows of `up`."""
    down: Tensor
    up: Tensor
    alpha: float
    swapped: bool = False
    """Whether diffusers has the two halves of the rows the other way round."""


Changes = dict[str, Tensor]
"""By module in diffusers: the change of its weight, applied to random inputs, since whole ones are large."""


def applied(down: Tensor, up: Tensor, scale: float) -> Tensor:
    """`scale * up @ down` of the same few inputs for every module with so many; float64."""
    flat = down.double().flatten(1)
    probes = torch.randn(
        flat.shape[1], PROBES, dtype=torch.float64, generator=torch.Generator().manual_seed(7)
    )
    return scale * (up.double().flatten(1) @ (flat @ probes))


def changes(lora: Sequence[Trained], *, scaled: bool = True) -> Changes:
    """What a LoRA means; without alphas, they are its ranks."""
    found: Changes = {}
    for one in lora:
        whole = applied(one.down, one.up, one.alpha / one.down.shape[0] if scaled else 1.0)
        if one.swapped:
            whole = torch.cat(list(reversed(whole.chunk(2))))
        found |= zip(one.modules, _split(one, whole), strict=True)
    return found


def _split(one: Trained, whole: Tensor) -> Sequence[Tensor]:
    rows, parts = whole.shape[0], len(one.modules)
    if parts == 4:  # Flux's queries, keys, values and the wider MLP
        return torch.split(whole, [rows // 7] * 3 + [rows // 7 * 4])
    return torch.chunk(whole, parts)


def trained(
    network: nn.Module, names: Mapping[str, Sequence[str]], swapped: Sequence[str] = (), rank: int = RANK
) -> list[Trained]:
    """A LoRA of some modules: names in the file's checkpoint, and those in diffusers."""
    shapes = {path: tuple(one.weight.shape) for path, one in network.named_modules() if _is_layer(one)}
    torch.manual_seed(0)
    lora = []
    for number, (name, modules) in enumerate(names.items()):
        _, into, *sides = shapes[modules[0]]
        out = sum(shapes[module][0] for module in modules)
        down, up = torch.randn(rank, into, *sides), torch.randn(out, rank, *(1 for _ in sides))
        lora.append(Trained(name, tuple(modules), down, up, 1.0 + number % 3, name in swapped))
    return lora


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, nn.Conv2d))


class Naming(NamedTuple):
    """How a file calls the tensors of a module."""

    module: Callable[[str], str]
    sides: tuple[str, str]
    """Ends of the names of first and second factor."""
    alphas: bool


def _dotted(prefix: str) -> Callable[[str], str]:
    return lambda name: prefix + name


def flat(prefix: str) -> Callable[[str], str]:
    """The prefix, and the name with underscores."""
    return lambda name: prefix + name.replace(".", "_")


PEFT: Final = ".lora_A.weight", ".lora_B.weight"
DEFAULT: Final = ".lora_A.default.weight", ".lora_B.default.weight"
KOHYA: Final = ".lora_down.weight", ".lora_up.weight"
OLD: Final = ".lora.down.weight", ".lora.up.weight"
OWN_NAMINGS: Final[Mapping[str, Naming]] = {
    "diffusers": Naming(_dotted("{network}."), PEFT, alphas=False),
    "diffusers, with alphas": Naming(_dotted("{network}."), PEFT, alphas=True),
    "diffusers, older": Naming(_dotted("{network}."), OLD, alphas=False),
    "OneTrainer": Naming(_dotted("{network}."), KOHYA, alphas=True),
    "OneTrainer, flat": Naming(flat("lora_{network}_"), KOHYA, alphas=True),
    "PEFT": Naming(_dotted("base_model.model."), PEFT, alphas=False),
    "PEFT, bare": Naming(_dotted(""), PEFT, alphas=False),
    "PEFT, default": Naming(_dotted(""), DEFAULT, alphas=False),
    "bare, with alphas": Naming(_dotted(""), KOHYA, alphas=True),
    "LyCORIS": Naming(flat("lycoris_"), KOHYA, alphas=True),
}
"""Of files that call modules as diffusers does; `{network}` is `transformer` or `unet`."""
ORIGINAL_NAMINGS: Final[Mapping[str, Naming]] = {
    "kohya": Naming(flat("lora_unet_"), KOHYA, alphas=True),
    "ComfyUI": Naming(_dotted("diffusion_model."), KOHYA, alphas=True),
    "ai-toolkit": Naming(_dotted("diffusion_model."), PEFT, alphas=False),
    "ai-toolkit, with alphas": Naming(_dotted("diffusion_model."), PEFT, alphas=True),
    "PEFT of the original": Naming(_dotted("base_model.model."), PEFT, alphas=False),
    "original, bare": Naming(_dotted(""), PEFT, alphas=False),
}
"""Of files that call modules as the original checkpoint does."""


def file_of(family: str, naming: str, network: nn.Module, name: str) -> tuple[dict[str, Tensor], Changes]:
    """A file of a naming, and what it means; `name` is the network's in the pipeline."""
    if naming in OWN_NAMINGS:
        how, lora = OWN_NAMINGS[naming], trained(network, OWN[family])
    else:
        how = ORIGINAL_NAMINGS[naming]
        lora = trained(network, ORIGINAL[family], ORIGINAL_SWAPPED.get(family, ()))
    return written(lora, how, name), changes(lora, scaled=how.alphas)


def written(lora: Sequence[Trained], naming: Naming, network: str) -> dict[str, Tensor]:
    """The tensors of a file."""
    tensors: dict[str, Tensor] = {}
    for one in lora:
        name = naming.module("\0" + one.name).replace("{network}", network).replace("\0", "")
        tensors |= {name + naming.sides[0]: one.down, name + naming.sides[1]: one.up}
        if naming.alphas:
            tensors[f"{name}.alpha"] = torch.tensor(one.alpha)
    return tensors


def _own(*names: str) -> dict[str, tuple[str, ...]]:
    return {name: (name,) for name in names}


def _qkv(
    before: str, after: str, names: Sequence[str] = ("to_q", "to_k", "to_v")
) -> dict[str, tuple[str, ...]]:
    return {f"{before}.qkv": tuple(f"{after}.{name}" for name in names)}


ADDED: Final = "add_q_proj", "add_k_proj", "add_v_proj"
_JOINT: Final = _own(
    *(f"transformer_blocks.0.attn.{name}" for name in ("to_q", "to_out.0", "add_k_proj", "to_add_out"))
)
_FLUX2: Final = _own(
    "single_transformer_blocks.1.attn.to_qkv_mlp_proj", "single_transformer_blocks.0.attn.to_out", "norm_out.linear",
    "transformer_blocks.0.ff.linear_in", "double_stream_modulation_txt.linear", "x_embedder",
) | _JOINT  # fmt: skip
_QWEN: Final = (
    _own("transformer_blocks.1.img_mod.1", "transformer_blocks.1.txt_mlp.net.0.proj", "img_in") | _JOINT
)
OWN: Final[Mapping[str, Mapping[str, Sequence[str]]]] = {
    "sd": _own(
        "conv_in", "time_embedding.linear_1", "down_blocks.1.attentions.0.proj_in", "mid_block.resnets.0.conv1",
        "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_out.0", "mid_block.resnets.0.time_emb_proj",
        "down_blocks.1.attentions.0.transformer_blocks.0.ff.net.0.proj", "down_blocks.1.downsamplers.0.conv",
    ),
    "sdxl": _own(
        "add_embedding.linear_1", "add_embedding.linear_2", "time_embedding.linear_2", "conv_in",
        "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k", "down_blocks.1.resnets.0.conv_shortcut",
        "up_blocks.0.attentions.0.transformer_blocks.1.attn1.to_out.0", "down_blocks.1.attentions.0.proj_out",
    ),
    "sd3": _own(
        "transformer_blocks.0.attn2.to_k", "transformer_blocks.2.norm1_context.linear", "proj_out",
        "time_text_embed.text_embedder.linear_1", "transformer_blocks.1.ff_context.net.2",
    ) | _JOINT,
    "flux-inpaint": _own(
        "transformer_blocks.1.norm1.linear", "transformer_blocks.0.ff_context.net.0.proj", "x_embedder",
        "single_transformer_blocks.1.proj_mlp", "single_transformer_blocks.0.proj_out", "norm_out.linear",
        "single_transformer_blocks.0.norm.linear",
    ) | _JOINT,
    "chroma": _own(
        "single_transformer_blocks.1.proj_mlp", "distilled_guidance_layer.layers.1.linear_2", "proj_out",
    ) | _JOINT,
    "z-image": _own(
        "layers.0.attention.to_q", "layers.0.attention.to_out.0", "layers.1.feed_forward.w1",
        "layers.0.adaLN_modulation.0",
        "noise_refiner.0.attention.to_k", "context_refiner.0.feed_forward.w2", "all_x_embedder.2-1", "cap_embedder.1",
        "all_final_layer.2-1.adaLN_modulation.1", "t_embedder.mlp.0",
    ),
    "flux2": _FLUX2 | _own("time_guidance_embed.guidance_embedder.linear_1"),
    "flux2-klein": _FLUX2,
    "qwen-image": _QWEN,
    "qwen-image-edit-plus": _QWEN,
}  # fmt: skip
"""Modules by their names in diffusers, by family."""
_FLUX_BLOCKS: Final = {
    **_qkv("double_blocks.0.img_attn", "transformer_blocks.0.attn"),
    **_qkv("double_blocks.1.txt_attn", "transformer_blocks.1.attn", ADDED),
    "double_blocks.0.img_attn.proj": ("transformer_blocks.0.attn.to_out.0",),
    "double_blocks.0.txt_attn.proj": ("transformer_blocks.0.attn.to_add_out",),
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
}
_FLUX2_ORIGINAL: Final = {
    **_FLUX_BLOCKS,
    "double_blocks.0.img_mlp.0": ("transformer_blocks.0.ff.linear_in",),
    "single_blocks.1.linear1": ("single_transformer_blocks.1.attn.to_qkv_mlp_proj",),
    "single_blocks.0.linear2": ("single_transformer_blocks.0.attn.to_out",),
    "final_layer.linear": ("proj_out",),
}
ORIGINAL: Final[Mapping[str, Mapping[str, Sequence[str]]]] = {
    "qwen-image": _QWEN,
    "qwen-image-edit-plus": _QWEN,
    "sd": {
        "input_blocks.1.1.transformer_blocks.0.attn2.to_v": (
            "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_v",
        ),
        "input_blocks.1.1.proj_in": ("down_blocks.0.attentions.0.proj_in",),
        "middle_block.0.in_layers.2": ("mid_block.resnets.0.conv1",),
        "time_embed.0": ("time_embedding.linear_1",),
    },
    "sdxl": {
        "input_blocks.3.1.transformer_blocks.0.attn1.to_q": (
            "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q",
        ),
        "input_blocks.3.1.proj_in": ("down_blocks.1.attentions.0.proj_in",),
        "middle_block.0.in_layers.2": ("mid_block.resnets.0.conv1",),
        "middle_block.2.out_layers.3": ("mid_block.resnets.1.conv2",),
        "label_emb.0.0": ("add_embedding.linear_1",),
        "label_emb.0.2": ("add_embedding.linear_2",),
        "time_embed.0": ("time_embedding.linear_1",),
    },
    "sd3": {
        **_qkv("joint_blocks.0.x_block.attn", "transformer_blocks.0.attn"),
        **_qkv("joint_blocks.0.x_block.attn2", "transformer_blocks.0.attn2"),
        **_qkv("joint_blocks.1.context_block.attn", "transformer_blocks.1.attn", ADDED),
        "joint_blocks.1.x_block.attn.proj": ("transformer_blocks.1.attn.to_out.0",),
        "joint_blocks.1.context_block.mlp.fc2": ("transformer_blocks.1.ff_context.net.2",),
        "joint_blocks.2.context_block.adaLN_modulation.1": ("transformer_blocks.2.norm1_context.linear",),
        "final_layer.linear": ("proj_out",),
    },
    "flux-inpaint": {
        **_FLUX_BLOCKS,
        "double_blocks.0.img_mlp.0": ("transformer_blocks.0.ff.net.0.proj",),
        "double_blocks.1.txt_mlp.2": ("transformer_blocks.1.ff_context.net.2",),
        "double_blocks.1.txt_mod.lin": ("transformer_blocks.1.norm1_context.linear",),
        "single_blocks.1.linear2": ("single_transformer_blocks.1.proj_out",),
        "single_blocks.0.modulation.lin": ("single_transformer_blocks.0.norm.linear",),
        "time_in.in_layer": ("time_text_embed.timestep_embedder.linear_1",),
        "vector_in.out_layer": ("time_text_embed.text_embedder.linear_2",),
        "final_layer.linear": ("proj_out",),
        "final_layer.adaLN_modulation.1": ("norm_out.linear",),
    },
    "chroma": {
        **_FLUX_BLOCKS,
        "double_blocks.0.img_mlp.0": ("transformer_blocks.0.ff.net.0.proj",),
        "single_blocks.1.linear2": ("single_transformer_blocks.1.proj_out",),
    },
    "z-image": {
        **_qkv("layers.0.attention", "layers.0.attention"),
        **_qkv("noise_refiner.0.attention", "noise_refiner.0.attention"),
        "layers.0.attention.out": ("layers.0.attention.to_out.0",),
        "context_refiner.0.feed_forward.w3": ("context_refiner.0.feed_forward.w3",),
        "layers.1.adaLN_modulation.0": ("layers.1.adaLN_modulation.0",),
        "cap_embedder.1": ("cap_embedder.1",),
    },
    "flux2": _FLUX2_ORIGINAL,
    "flux2-klein": _FLUX2_ORIGINAL,
}
"""Modules of diffusers by their names in the original checkpoint, by family."""
FLUX2_EMBEDDERS: Final = {
    "guidance_in.in_layer": ("time_guidance_embed.guidance_embedder.linear_1",),
    "double_stream_modulation_img.lin": ("double_stream_modulation_img.linear",),
    "time_in.out_layer": ("time_guidance_embed.timestep_embedder.linear_2",),
}
"""Modules of Flux.2 that diffusers reads under the original's names, but not in kohya's spelling of them."""
LIGHTNING: Final = _own(
    *(
        f"transformer_blocks.{block}.{name}"
        for block in (0, 1)
        for name in (
            *(f"attn.{each}" for each in ("to_q", "to_k", "to_v", "to_out.0", *ADDED, "to_add_out")),
            *(f"{each}_mlp.net.{layer}" for each in ("img", "txt") for layer in ("0.proj", "2")),
            *("img_mod.1", "txt_mod.1"),
        )
    )
)
"""Every layer of Qwen-Image's blocks, as the Lightning LoRAs have factors for them."""
ORIGINAL_SWAPPED: Final = {
    "sd3": ("joint_blocks.2.context_block.adaLN_modulation.1",),
    "flux-inpaint": ("final_layer.adaLN_modulation.1",),
}
"""Modules whose halves diffusers swaps."""


FLUX2: Final = ("flux2", "flux2-klein")
QWEN: Final = ("qwen-image", "qwen-image-edit-plus")
READ_BY_DIFFUSERS: Final = (
    *((family, naming) for family in OWN for naming in ("diffusers", "diffusers, older")),
    *((family, "diffusers, with alphas") for family in ("flux-inpaint", "chroma")),
    *((family, naming) for family in ("z-image", *QWEN) for naming in ("PEFT, default", "bare, with alphas")),
    *((family, naming) for family in ("flux-inpaint", "chroma") for naming in ("kohya", "ComfyUI")),
    *((family, "kohya") for family in ("sdxl", "z-image", *FLUX2, *QWEN)),
    *((family, naming) for family in QWEN for naming in ("ComfyUI", "ai-toolkit", "ai-toolkit, with alphas")),
    *((family, naming) for family in FLUX2 for naming in ("ai-toolkit", "PEFT of the original")),
)
"""Family and naming of the files that diffusers loads.

It leaves out Flux's embedders and last layers of kohya's, and gives projections of UNets' attention there the alpha
that most modules have, which is their own here. Of other files it takes nothing, or it leaves out their alphas.
"""


TWINS: Final = ("flux2-klein", "qwen-image-edit-plus")
"""Families that diffusers reads by the loader of another one, and whose modules have the other's names."""


def all_cases() -> Iterator[tuple[str, str]]:
    """Family and naming of each file; of twins, those that diffusers loads."""
    for namings, families in ((OWN_NAMINGS, OWN), (ORIGINAL_NAMINGS, ORIGINAL)):
        for family in families:
            every = ((family, naming) for naming in namings)
            yield from (case for case in every if family not in TWINS or case in READ_BY_DIFFUSERS)
