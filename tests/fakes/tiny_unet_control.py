"""Tiny ControlNets of UNets with random weights, also of their outputs, which are zeros before training."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import ControlNetModel

from tests.fakes.tiny_unet import CROSS, MIXING, SHAPES


def net(
    shape: str = "xl", *, seed: int = 0, dtype: torch.dtype = torch.float32, scaled: int = 4, **options: Any
) -> ControlNetModel:
    """For the UNet of `shape` of `tiny_unet`; a latent's pixel is `scaled` pixels a side."""
    torch.manual_seed(seed)
    config = {name: value for name, value in SHAPES[shape].items() if name != "up_block_types"}
    kind: Any = ControlNetModel
    made: ControlNetModel = kind(
        **{
            "layers_per_block": 1,
            "norm_num_groups": 8,
            "cross_attention_dim": CROSS,
            "conditioning_embedding_out_channels": (8,) * scaled.bit_length(),
            **config,
            **options,
        }
    )
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.startswith(("controlnet_down", "controlnet_mid", "controlnet_cond_embedding.conv_out")):
                weight.normal_(0, 0.1)
            elif ".attn" in name and name.endswith("weight"):
                weight.mul_(MIXING)
    torch.nn.Module.to(made, dtype)
    return made.eval().requires_grad_(requires_grad=False)
