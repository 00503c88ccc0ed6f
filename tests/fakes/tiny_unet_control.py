"""Tiny ControlNets of UNets with random weights, also of their outputs, which are zeros before training."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch
from diffusers import ControlNetModel

from giornata_lab.bench.compute.tiny_unet import CROSS, MIXING, SHAPES

LATENT_CHANNELS: Final = 4
"""Also beside UNets that see a mask: ControlNets do not."""
ZEROS: Final = ("controlnet_down", "controlnet_mid", "controlnet_cond_embedding.conv_out")


def net(shape: str = "xl", **options: Any) -> ControlNetModel:
    """For the UNet of `shape` of `tiny_unet`; a latent's pixel is four pixels a side."""
    common = {"layers_per_block": 1, "norm_num_groups": 8, "cross_attention_dim": CROSS}
    return beside({**common, **SHAPES[shape]}, **{"scaled": 4, **options})


def beside(
    config: Mapping[str, Any],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    scaled: int = 8,
    **options: Any,
) -> ControlNetModel:
    """For a UNet of this configuration; a latent's pixel is `scaled` pixels a side."""
    torch.manual_seed(seed)
    taken = inspect.signature(ControlNetModel.__init__).parameters
    kind: Any = ControlNetModel
    made: ControlNetModel = kind(
        **{
            **{name: value for name, value in config.items() if name in taken},
            "in_channels": LATENT_CHANNELS,
            "conditioning_embedding_out_channels": (8,) * scaled.bit_length(),
            **options,
        }
    )
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.startswith(ZEROS):
                weight.normal_(0, 0.1)
            elif ".attn" in name and name.endswith("weight"):
                weight.mul_(MIXING)
    torch.nn.Module.to(made, dtype)
    return made.eval().requires_grad_(requires_grad=False)
