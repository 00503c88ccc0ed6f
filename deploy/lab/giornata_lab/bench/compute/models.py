"""The networks that are measured, with random weights: mid-size, and in the shapes of published checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from diffusers import (
    AutoencoderKL,
    ChromaTransformer2DModel,
    Flux2Transformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    ZImageTransformer2DModel,
)
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

from giornata_denoiser.families.driven.chroma import Chroma
from giornata_denoiser.families.driven.flux2 import Flux2, Flux2Klein
from giornata_denoiser.families.driven.qwen_image import QwenImage, QwenImageEdit
from giornata_denoiser.families.driven.sd3 import StableDiffusion3
from giornata_denoiser.families.driven.z_image import ZImage
from giornata_denoiser.families.flux import FluxInpaint
from giornata_denoiser.families.network import ModelFamily, Network
from giornata_denoiser.families.sampling import DiscreteTime, FlowMatching, shifted_always
from giornata_denoiser.families.unet.network import UnetInpaint, network_of
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.tiny_flux import SCHEDULER

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
SHAPES: Final = {"mid": MID_SIZE, "real": REAL, "tiny": TINY}


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


DISCRETE: Final[Mapping[str, Any]] = {
    "_class_name": "DDIMScheduler",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
    "set_alpha_to_one": False,
    "steps_offset": 1,
}
HEADS: Final[Mapping[str, Any]] = {"attention_head_dim": 64, "num_attention_heads": 12}
WIDTH: Final = 768
FLUX2: Final[Mapping[str, Any]] = {
    **HEADS,
    "in_channels": 64,
    "num_layers": 2,
    "num_single_layers": 2,
    "joint_attention_dim": 256,
    "axes_dims_rope": (16, 16, 16, 16),
}
UNET: Final[Mapping[str, Any]] = {
    "in_channels": 4,
    "out_channels": 4,
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "cross_attention_dim": 768,
}
XL: Final[Mapping[str, Any]] = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}


@dataclass(frozen=True)
class MeasuredFamily:
    """One family."""

    module: Any
    """diffusers' class."""
    network: Callable[[Any], Network]
    """Over such a module."""
    mid: Mapping[str, Any]
    """Its configuration where it is timed: a step takes a second on one thread, or less."""
    published: tuple[str, Mapping[str, Any]] | None = None
    """A checkpoint's name on the hub, and its configuration as far as it is not diffusers' default."""
    text: int = 64
    """Tokens of a prompt."""


FAMILIES: Final[Mapping[str, MeasuredFamily]] = {
    "sd": MeasuredFamily(
        UNet2DConditionModel,
        network_of,
        {**UNET, "block_out_channels": (96, 192, 384, 384), "attention_head_dim": 8},
        ("stable-diffusion-v1-5/stable-diffusion-v1-5", {**UNET, "attention_head_dim": 8}),
        text=77,
    ),
    "sdxl": MeasuredFamily(
        UNet2DConditionModel,
        network_of,
        {
            **UNET,
            **XL,
            "block_out_channels": (96, 192, 384),
            "transformer_layers_per_block": (1, 2, 4),
            "attention_head_dim": (3, 6, 12),
        },
        (
            "stabilityai/stable-diffusion-xl-base-1.0",
            {
                **UNET,
                **XL,
                "block_out_channels": (320, 640, 1280),
                "transformer_layers_per_block": (1, 2, 10),
                "attention_head_dim": (5, 10, 20),
                "cross_attention_dim": 2048,
            },
        ),
        text=77,
    ),
    "sd3": MeasuredFamily(
        SD3Transformer2DModel,
        StableDiffusion3,
        {
            **HEADS,
            "num_layers": 4,
            "qk_norm": "rms_norm",
            "joint_attention_dim": 256,
            "pooled_projection_dim": 128,
            "caption_projection_dim": WIDTH,
            "pos_embed_max_size": 96,
        },
        (
            "stabilityai/stable-diffusion-3.5-large",
            {
                "num_layers": 38,
                "num_attention_heads": 38,
                "caption_projection_dim": 2432,
                "pos_embed_max_size": 192,
                "qk_norm": "rms_norm",
            },
        ),
        text=333,
    ),
    "z-image": MeasuredFamily(
        ZImageTransformer2DModel,
        ZImage,
        {
            "dim": WIDTH,
            "n_layers": 4,
            "n_refiner_layers": 1,
            "n_heads": 12,
            "n_kv_heads": 12,
            "cap_feat_dim": 256,
            "axes_dims": [16, 24, 24],
        },
        ("Tongyi-MAI/Z-Image-Turbo", {}),
    ),
    "flux2": MeasuredFamily(
        Flux2Transformer2DModel,
        Flux2,
        FLUX2,
        ("black-forest-labs/FLUX.2-dev", {}),
        text=512,
    ),
    "flux2-klein": MeasuredFamily(
        Flux2Transformer2DModel,
        Flux2Klein,
        {**FLUX2, "guidance_embeds": False},
        (
            "black-forest-labs/FLUX.2-klein-4B",
            {
                "num_layers": 5,
                "num_single_layers": 20,
                "num_attention_heads": 24,
                "joint_attention_dim": 7680,
                "guidance_embeds": False,
            },
        ),
        text=512,
    ),
    "qwen-image": MeasuredFamily(
        QwenImageTransformer2DModel,
        QwenImage,
        {**HEADS, "num_layers": 4, "joint_attention_dim": 256, "axes_dims_rope": (16, 24, 24)},
        ("Qwen/Qwen-Image", {}),
    ),
    "qwen-image-edit-plus": MeasuredFamily(
        QwenImageTransformer2DModel,
        QwenImageEdit,
        {
            **HEADS,
            "num_layers": 4,
            "joint_attention_dim": 256,
            "axes_dims_rope": (16, 24, 24),
            "zero_cond_t": True,
        },
        ("Qwen/Qwen-Image-Edit-2511", {"zero_cond_t": True}),
        text=256,
    ),
    "chroma": MeasuredFamily(
        ChromaTransformer2DModel,
        Chroma,
        {
            **HEADS,
            "num_layers": 2,
            "num_single_layers": 2,
            "joint_attention_dim": 256,
            "axes_dims_rope": (16, 24, 24),
            "approximator_hidden_dim": 512,
            "approximator_layers": 2,
        },
        ("lodestones/Chroma1-HD", {}),
    ),
}


def module(
    name: str,
    *,
    published: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device,
    changed: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Make diffusers' module of a family, its configuration `changed`; equal arguments make equal weights.

    Raises:
        ValueError: the family has no published shape here.
    """
    of = FAMILIES[name]
    config = of.mid
    if published:
        if of.published is None:
            raise ValueError(f"{name} has no published shape here")
        config = of.published[1]
    torch.manual_seed(0)
    with device:
        made = of.module(**{**config, **changed})
    torch.nn.Module.to(made, dtype)
    return made.eval().requires_grad_(requires_grad=False)


def family(name: str, **how: Any) -> ModelFamily:
    """The family over such a module; see :func:`module`."""
    network: Any = FAMILIES[name].network(module(name, **how))
    unet = FAMILIES[name].module is UNet2DConditionModel
    schedule = DiscreteTime(DISCRETE) if unet else FlowMatching(SCHEDULER, shifted_always)
    return ModelFamily(network.text, schedule, network)
