"""UNets with random weights in the shapes that are measured, and the tiles that masks touch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor

from giornata_denoiser.families.unet.network import UnetFill, UnetInpaint
from giornata_lab.bench.compute import tiny_unet

WIDE: Final[Mapping[str, Any]] = {"layers_per_block": 2, "norm_num_groups": 32, "cross_attention_dim": 768}
SHAPES: Final[Mapping[str, tuple[str, int, Mapping[str, Any]]]] = {
    "sdxl": (
        "xl",
        128,
        {
            **WIDE,
            "block_out_channels": (96, 192, 384),
            "transformer_layers_per_block": (1, 2, 4),
            "attention_head_dim": (3, 6, 12),
        },
    ),
    "sd": ("sd", 64, {**WIDE, "block_out_channels": (96, 192, 384, 384), "attention_head_dim": 8}),
    "tiny": ("xl", 32, {}),
}
"""Name → kind, latent pixels a side of a picture, configuration: SDXL and Stable Diffusion with fewer channels."""


def box(side: int, ratio: float) -> Tensor:
    """(side, side) bool latent pixels: a square in the middle."""
    width = max(1, round(side * ratio**0.5))
    start = (side - width) // 2
    touched = torch.zeros(side, side, dtype=torch.bool)
    touched[start : start + width, start : start + width] = True
    return touched


def strip(side: int, ratio: float) -> Tensor:
    """(side, side) bool latent pixels: a diagonal band from corner to corner; its smallest window is the picture."""
    cell = torch.arange(side)
    far = (cell[:, None] - cell[None, :]).abs()
    return far <= far.flatten().sort().values[round(ratio * side * side) - 1]


MASKS: Final = {"box": box, "strip": strip}


def touched_tiles(mask: Tensor, side: int) -> Tensor:
    """(height, width) bool tiles of `side` latent pixels that a mask of latent pixels touches."""
    return F.max_pool2d(mask[None, None].float(), side)[0, 0] > 0


def network(name: str) -> tuple[UnetInpaint | UnetFill, int]:
    """The network of a shape, and the side of its picture in tiles."""
    kind, latent, config = SHAPES[name]
    made = tiny_unet.network(kind, **config)
    return made, latent // made.side
