"""Tiny ControlNets of Flux with random weights, also of their outputs, which are zeros before training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import FluxControlNetModel

from giornata_lab.bench.compute import tiny_flux


def net(doubles: int = 2, singles: int = 1, *, seed: int = 0, **options: Any) -> FluxControlNetModel:
    """For the transformers of `tiny_flux`; it makes so many samples for double and for single blocks."""
    torch.manual_seed(seed)
    kind: Any = FluxControlNetModel
    made: FluxControlNetModel = kind(
        **{
            "in_channels": tiny_flux.LATENT,
            "num_layers": doubles,
            "num_single_layers": singles,
            "attention_head_dim": 16,
            "num_attention_heads": 4,
            "joint_attention_dim": tiny_flux.JOINT_DIM,
            "pooled_projection_dim": tiny_flux.POOLED_DIM,
            "guidance_embeds": True,
            "axes_dims_rope": (4, 6, 6),
            **options,
        }
    )
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.startswith("controlnet_"):
                weight.normal_(0, 0.1)
            elif ".attn." in name:
                weight.mul_(tiny_flux.MIXING)
    return made.eval().requires_grad_(requires_grad=False)


def beside(
    config: Mapping[str, Any], doubles: int = 1, singles: int = 1, *, seed: int = 0, **options: Any
) -> FluxControlNetModel:
    """For a transformer of this configuration."""
    kept = (
        "in_channels", "attention_head_dim", "num_attention_heads", "joint_attention_dim", "pooled_projection_dim",
        "guidance_embeds", "axes_dims_rope",
    )  # fmt: skip
    shape: dict[str, Any] = {name: config[name] for name in kept}
    return net(doubles, singles, seed=seed, **{**shape, "in_channels": tiny_flux.LATENT, **options})
