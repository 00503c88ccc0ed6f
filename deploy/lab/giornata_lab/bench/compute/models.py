"""Flux transformers with random weights in the sizes that are measured, and an autoencoder beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from diffusers import AutoencoderKL
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

from giornata_denoiser.families.flux import FluxInpaint
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.families.unet.network import UnetInpaint
from giornata_lab.bench.compute import tiny_flux

LATENT_CHANNELS: Final = 16
CHANNELS: Final = 4 * LATENT_CHANNELS
"""Channels of a token: 2x2 latent pixels."""
TOKEN_PIXELS: Final = 16
"""A side of a token in the picture."""

MID_SIZE: Final[Mapping[str, Any]] = {
    "num_layers": 4,
    "num_single_layers": 8,
    "attention_head_dim": 64,
    "num_attention_heads": 12,
    "joint_attention_dim": 256,
    "pooled_projection_dim": 128,
    "axes_dims_rope": (16, 24, 24),
}
"""About 160 M parameters: 12 blocks of width 768."""
REAL: Final[Mapping[str, Any]] = {
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "axes_dims_rope": (16, 56, 56),
}
"""FLUX.1-dev: 12 B parameters, 57 blocks of width 3072."""
DEEP: Final[Mapping[str, Any]] = {
    **MID_SIZE,
    "num_layers": REAL["num_layers"],
    "num_single_layers": REAL["num_single_layers"],
    "num_attention_heads": 6,
}
"""About 190 M parameters: FLUX.1-dev's 57 blocks, of width 384."""


TINY: Final[Mapping[str, Any]] = {
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 24,
    "pooled_projection_dim": 20,
    "axes_dims_rope": (4, 6, 6),
}
"""To try a benchmark out; its figures say nothing."""
SHAPES: Final = {"mid": MID_SIZE, "deep": DEEP, "real": REAL, "tiny": TINY}


def flux(shape: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> ModelFamily:
    """A family over a transformer of `shape` with random weights, made where it runs."""
    torch.manual_seed(0)
    kind: Any = FluxTransformer2DModel
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = kind(patch_size=1, in_channels=CHANNELS, guidance_embeds=True, **shape)
    finally:
        torch.set_default_dtype(usual)
    return tiny_flux.family(FluxInpaint(model.eval().requires_grad_(requires_grad=False)))


def transformer_of(family: ModelFamily) -> Any:
    """diffusers' module under a family of Flux."""
    if not isinstance(family.network, FluxInpaint):
        raise TypeError(f"expected a family of Flux, received {type(family.network).__name__}")
    return family.network.transformer


def described(family: ModelFamily) -> str:
    """For JSON."""
    network: Any = family.network
    module = network.unet if isinstance(network, UnetInpaint) else network.transformer
    count = sum(weight.numel() for weight in module.parameters())
    if not isinstance(network, FluxInpaint):
        where = f"{str(family.dtype).removeprefix('torch.')} on {family.device.type}"
        return f"{type(module).__name__} of {count / 1e6:.0f} M random weights, {where}"
    config = module.config
    width = config.num_attention_heads * config.attention_head_dim
    return (
        f"Flux of {count / 1e6:.0f} M random weights, {config.num_layers} double and {config.num_single_layers} "
        f"single blocks of width {width}, {str(family.dtype).removeprefix('torch.')} on {family.device.type}"
    )


def autoencoder(dtype: torch.dtype, device: torch.device) -> Any:
    """Flux's autoencoder at a quarter of its width, random weights: 8 pixels a latent pixel, 16 channels."""
    torch.manual_seed(0)
    widths = (32, 64, 128, 128)
    kind: Any = AutoencoderKL
    model = kind(
        latent_channels=LATENT_CHANNELS,
        block_out_channels=widths,
        layers_per_block=2,
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    return model.to(device, dtype).eval().requires_grad_(requires_grad=False)
