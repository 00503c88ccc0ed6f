"""Tiny ControlNets of Stable Diffusion 3 with random weights, also of those that are zeros before training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import SD3ControlNetModel

MIXING = 2.0
"""Random weights hardly mix tokens."""


def net(
    config: Mapping[str, Any],
    depth: int = 2,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> SD3ControlNetModel:
    """For a transformer of this configuration, with so many blocks; the first one attends twice, as those of 3.5."""
    torch.manual_seed(seed)
    kept = (
        "sample_size", "patch_size", "in_channels", "attention_head_dim", "num_attention_heads",
        "joint_attention_dim", "caption_projection_dim", "pooled_projection_dim", "pos_embed_max_size", "qk_norm",
    )  # fmt: skip
    kind: Any = SD3ControlNetModel
    shape = {name: config[name] for name in kept}
    made: SD3ControlNetModel = kind(
        **{**shape, "num_layers": depth, "dual_attention_layers": (0,), **options}
    )
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.startswith("controlnet_blocks"):
                weight.normal_(0, 0.1)
            elif name.startswith("pos_embed_input"):
                weight.normal_(0, 0.3)
            elif ".attn" in name and weight.ndim == 2:
                weight.mul_(MIXING)
    torch.nn.Module.to(made, dtype)
    return made.eval().requires_grad_(requires_grad=False)
