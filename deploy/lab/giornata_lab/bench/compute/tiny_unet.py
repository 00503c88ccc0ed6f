"""Tiny UNets with random weights, sequences for them, and what a recording of one forward holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor

from giornata.packed.attention import DenseKV
from giornata.packed.packing import Region, make_region
from giornata.wire.models import BORDER, MOMENTS
from giornata_denoiser.families.network import SequenceInputs
from giornata_denoiser.families.unet.network import UnetFill, UnetInpaint, network_of

CROSS: Final = 24
POOLED: Final = 20
MIXING: Final = 2.0
"""Random weights hardly mix cells; attention scaled by this lets a wrong key show, and does not amplify rounding."""
SD: Final[Mapping[str, Any]] = {"block_out_channels": (16, 16, 32, 32), "attention_head_dim": 2}
XL: Final[Mapping[str, Any]] = {
    "block_out_channels": (16, 32, 48),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 1, 2),
    "attention_head_dim": (1, 2, 3),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": POOLED + 6 * 8,
}
SHALLOW: Final[Mapping[str, Any]] = {
    **XL,
    "block_out_channels": (16, 32),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 1),
    "attention_head_dim": (1, 2),
}
"""An XL of two levels, whose steps cost half as much: for what any of its blocks shows."""
SHAPES: Final = {"sd": SD, "xl": XL, "shallow": SHALLOW}


def unet(shape: str = "xl", *, fill: bool = False, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """A UNet of one layer a block; 9 input channels where it is to `fill`."""
    torch.manual_seed(0)
    kind: Any = UNet2DConditionModel
    common = {
        "in_channels": 9 if fill else 4,
        "out_channels": 4,
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "cross_attention_dim": CROSS,
    }
    model = kind(**{**common, **SHAPES[shape], **config})
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".attn" in name and name.endswith("weight"):
                weight.mul_(MIXING)
            elif "norm" in name or name.endswith(
                "bias"
            ):  # ones and zeros would hide a wrong statistic or border
                weight.add_(0.2 * torch.randn_like(weight))
    torch.nn.Module.to(model, dtype)
    return model.eval().requires_grad_(requires_grad=False)


def network(
    shape: str = "xl", *, fill: bool = False, dtype: torch.dtype = torch.float32, **config: Any
) -> UnetInpaint | UnetFill:
    """Over the same weights as :func:`unet`."""
    return network_of(unet(shape, fill=fill, dtype=dtype, **config))


@dataclass(frozen=True, eq=False)
class UnetPicture:
    """One sequence before a step."""

    grid: tuple[int, int]
    """Height and width in tiles."""
    latent: Tensor
    """(tiles, channels)"""
    conditioning: Mapping[str, Tensor]
    text: Mapping[str, Tensor]
    times: Tensor
    """(steps,)"""
    step: int


def picture(
    of: UnetInpaint | UnetFill,
    grid: tuple[int, int],
    *,
    words: int = 5,
    times: tuple[int, ...] = (901, 201),
    step: int = 0,
    seed: int = 0,
) -> UnetPicture:
    """Random values; the same arguments make an equal one."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(of.dtype)

    tiles = grid[0] * grid[1]
    tensors = {name: random(tiles, channels) for name, channels in of.conditioning.items()}
    tensors["mask"] = (tensors["mask"] > 0).to(of.dtype)
    text = {
        name: random(*(words if side is None else side for side in shape))
        for name, shape in of.text.tensors.items()
    }
    if "add_time_ids" in text:
        text["add_time_ids"] = text["add_time_ids"].abs().mul(100).round()
    return UnetPicture(
        grid, random(tiles, tensors["noise"].shape[1]), tensors, text, torch.tensor(times).float(), step
    )


def inputs(of: UnetInpaint | UnetFill, one: UnetPicture, where: Region | None = None) -> SequenceInputs:
    """The sequence of a picture, computed where `where` says."""
    prompt = of.text.prompt(one.text, one.grid, 1.0)
    return SequenceInputs(prompt, one.grid, where, 0, of.prepare(prompt, one.times, one.conditioning, ()))


def alone(
    model: Any, of: UnetInpaint | UnetFill, one: UnetPicture, residuals: Sequence[Tensor] | None = None
) -> Tensor:
    """(tiles, channels): diffusers' own forward of the picture alone; `model` has the weights of `of`.

    `residuals` are maps, (channels, height, width): of the skip connections, and of the middle.
    """
    rows, columns = one.grid
    side = of.side

    def as_map(tokens: Tensor) -> Tensor:
        tiles = tokens.view(rows, columns, -1, side, side)
        return torch.cat([torch.cat(list(row), -1) for row in tiles], -2)[None]

    sample = as_map(one.latent)
    if "masked_image_latents" in one.conditioning:
        beside = (as_map(one.conditioning[name]) for name in ("mask", "masked_image_latents"))
        sample = torch.cat((sample, *beside), 1)
    added = None
    if "add_time_ids" in one.text:
        added = {
            "text_embeds": one.text["pooled_prompt_embeds"][None],
            "time_ids": one.text["add_time_ids"][None],
        }
    with torch.inference_mode():
        out = model(
            sample,
            one.times[one.step],
            one.text["prompt_embeds"][None],
            added_cond_kwargs=added,
            down_block_additional_residuals=residuals and tuple(each[None] for each in residuals[:-1]),
            mid_block_additional_residual=residuals and residuals[-1][None],
            return_dict=False,
        )[0][0]
    strips = (strip.split(side, 2) for strip in out.split(side, 1))
    return torch.stack([tile.flatten() for strip in strips for tile in strip])


class Everything:
    """A recorder that keeps all it is shown."""

    def __init__(self) -> None:
        self.heads: dict[int, tuple[Tensor, Tensor]] = {}
        self.parts: dict[tuple[int, str], Tensor] = {}

    def hidden(self, block: int, hidden: Tensor) -> None:
        raise AssertionError("a UNet keeps no block's input")

    def keys_values(self, block: int, key: Tensor, value: Tensor) -> None:
        self.heads[block] = key.clone(), value.clone()

    def part(self, block: int, part: str, kept: Tensor) -> None:
        assert part in {BORDER, MOMENTS}
        self.parts[block, part] = kept.clone()


class RecordedUnetTokens:
    """What `Everything` kept, for the tiles outside a region; with room for the sequence's own or without."""

    keeps = False

    def __init__(self, of: Everything, where: Region, *, room: bool = False) -> None:
        self.of, self.where, self.room = of, where, len(where.computed) if room else 0

    def keys_values(self, block: int) -> DenseKV:
        parts = []
        for heads in self.of.heads[block]:
            outside = heads[self.where.outside]
            parts.append(torch.cat((outside.new_full((self.room, *outside.shape[1:]), torch.nan), outside)))
        return DenseKV(parts[0], parts[1], self.room)

    def hidden(self, block: int) -> Tensor:
        raise AssertionError("a UNet takes no block's input")

    def part(self, block: int, part: str) -> Tensor:
        return self.of.parts[block, part][self.where.outside]


def drawn(*lines: str) -> Region:
    """A region as a picture: a tile that is not a dot is computed."""
    found = make_region(torch.tensor([[tile != "." for tile in line] for line in lines]))
    assert found is not None
    return found
