"""Small autoencoders with random weights, and a gain for weights whose effect tests must see."""

from __future__ import annotations

from typing import Final

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    AutoencoderKLQwenImage21,
)

WIDTHS: Final = (8, 16, 16, 16)
"""Four levels: 8 pixels a latent pixel."""
NATIVE_PIXELS: Final = 256


def autoencoder(
    channels: int, scaling_factor: float, shift_factor: float | None = None, *, quant: bool = False
) -> AutoencoderKL:
    """An `AutoencoderKL` with latents of so many channels; `quant`: with 1x1 convolutions around them, as SD has."""
    return AutoencoderKL(
        latent_channels=channels,
        block_out_channels=WIDTHS,
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * len(WIDTHS),
        up_block_types=("UpDecoderBlock2D",) * len(WIDTHS),
        norm_num_groups=4,
        sample_size=NATIVE_PIXELS,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        use_quant_conv=quant,
        use_post_quant_conv=quant,
    ).eval()


def klein_autoencoder(channels: int) -> AutoencoderKLFlux2:
    """Flux.2's; its batch norm has random statistics, since those of a fresh one change nothing."""
    model = AutoencoderKLFlux2(
        latent_channels=channels,
        block_out_channels=WIDTHS,
        layers_per_block=1,
        norm_num_groups=4,
        sample_size=NATIVE_PIXELS,
    ).eval()
    model.bn.running_mean.normal_(std=0.2)
    model.bn.running_var.uniform_(0.5, 2.0)
    return model


def qwen_autoencoder() -> AutoencoderKLQwenImage:
    """Qwen-Image's, with its published statistics by channel."""
    return AutoencoderKLQwenImage(base_dim=8, dim_mult=[1, 1, 2, 2], num_res_blocks=1).eval()


def qwen_21_autoencoder() -> AutoencoderKLQwenImage21:
    """Qwen-Image 2.1's: 16 pixels a latent pixel, transparency, and the published statistics by channel."""
    widths = {"base_dim": 4, "decoder_base_dim": 4, "dim_mult": [1, 1, 2, 2, 2]}
    return AutoencoderKLQwenImage21(**widths, num_res_blocks=1).eval()


def sharpen(network: torch.nn.Module, gain: float, names: tuple[str, ...]) -> None:
    """Scale the weights whose names end so: freshly initialised attention is nearly uniform."""
    for name, weight in network.named_parameters():
        if name.endswith(names):
            weight.data.mul_(gain)
