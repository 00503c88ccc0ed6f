"""The built-in model, a small Flux-Fill: its parts, untrained; pictures as its tokens; and one forward of it.

A token is 8x8 pixels: the autoencoder makes 4x4 pixels one latent pixel of `LATENT_CHANNELS`, and the transformer
takes 2x2 of those. A picture of 128 px has 16x16 tokens, one of 256 px 32x32. Every part loads in diffusers and
transformers; one forward is what `FluxFillPipeline` computes for one step, from token ids and packed latents.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from torch import nn
from transformers import CLIPTextModel, T5EncoderModel

from giornata_lab.model.random import text_encoders as text
from giornata_lab.model.random.text_encoders import TextEncoders
from giornata_lab.model.scenes import scene

LATENT_CHANNELS: Final = 8
VAE_WIDTHS: Final = (16, 32, 64)
VAE_SCALE_FACTOR: Final = 2 ** (len(VAE_WIDTHS) - 1)
PATCH_CHANNELS: Final = 4 * LATENT_CHANNELS
FILL_CHANNELS: Final = 2 * PATCH_CHANNELS + 4 * VAE_SCALE_FACTOR**2
"""A token's input: the noisy latent, the masked picture's latent, and the mask's 8x8 pixels."""
TOKEN_PIXELS: Final = 2 * VAE_SCALE_FACTOR
NATIVE_PIXELS: Final = 256
UNSHIFTED_TOKENS: Final = 64
FIRST_LOG_VARIANCE: Final = -6.0
TEXT_TOKENS: Final = 10
TEXT_WIDTH: Final = 64
"""Width of T5's embeddings, and of CLIP's pooled one."""
HEADS: Final = 4
ROPE_AXES: Final = (4, 14, 14)
"""Channels of a head that encode text position, row and column; their sum is a head's width."""
DOUBLE_BLOCKS: Final = 2
SINGLE_BLOCKS: Final = 4


@dataclass(frozen=True)
class LatentSpace:
    """What distinguishes the autoencoders of the models here; all of them make 4x4 pixels one latent pixel."""

    channels: int
    centred: bool
    """Whether the pipeline subtracts a mean from latents (`shift_factor`); Stable Diffusion's only scale them."""


FILL_LATENTS: Final = LatentSpace(LATENT_CHANNELS, centred=True)


def autoencoder(space: LatentSpace = FILL_LATENTS) -> AutoencoderKL:
    """No attention in the middle: the encoding outside of a mask then does not depend on the mask.

    One group per norm: groups of two channels would keep only the sign of a flat picture's colour. The posterior begins
    narrow, so that the decoder sees signal and not noise from the first step.
    """
    vae = AutoencoderKL(
        latent_channels=space.channels,
        block_out_channels=VAE_WIDTHS,
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * len(VAE_WIDTHS),
        up_block_types=("UpDecoderBlock2D",) * len(VAE_WIDTHS),
        norm_num_groups=1,
        sample_size=NATIVE_PIXELS,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )
    log_variance = slice(space.channels, None)
    nn.init.zeros_(vae.encoder.conv_out.weight.detach()[log_variance])
    nn.init.constant_(vae.encoder.conv_out.bias.detach()[log_variance], FIRST_LOG_VARIANCE)
    return vae


def transformer() -> FluxTransformer2DModel:
    """Zero-initialised where DiT is: every block begins as the identity, the output as zero (Peebles & Xie, 3.2)."""
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=FILL_CHANNELS,
        out_channels=PATCH_CHANNELS,
        num_layers=DOUBLE_BLOCKS,
        num_single_layers=SINGLE_BLOCKS,
        attention_head_dim=sum(ROPE_AXES),
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        guidance_embeds=True,
        axes_dims_rope=ROPE_AXES,
    )
    for module in model.modules():
        if type(module).__name__.startswith("AdaLayerNorm"):
            nn.init.zeros_(module.linear.weight)
            nn.init.zeros_(module.linear.bias)
    for layer in (model.proj_out, model.time_text_embed.guidance_embedder.linear_2):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    return model


def text_encoders() -> text.TextEncoders:
    """One layer each, over a vocabulary in which every word of the captions is one token."""
    return text.text_encoders(" ".join(scene.words()), TEXT_TOKENS, width=TEXT_WIDTH, layers=1)


def scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Flux's own kind, with the shift of `time_shift` at 128 and at 256 px, and near it between them."""
    few, many = (NATIVE_PIXELS // 2 // TOKEN_PIXELS) ** 2, (NATIVE_PIXELS // TOKEN_PIXELS) ** 2
    return FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000,
        use_dynamic_shifting=True,
        base_image_seq_len=few,
        base_shift=math.log(time_shift(few)),
        max_image_seq_len=many,
        max_shift=math.log(time_shift(many)),
    )


def time_shift(tokens: int) -> float:
    """How much noisier a time counts for a picture of `tokens`: more tokens need more noise to hide the same thing.

    Esser et al., 2024, 5.3.2, from 64 tokens upward; `shifted` applies it.
    """
    return math.sqrt(max(tokens / UNSHIFTED_TOKENS, 1.0))


def shifted(times: torch.Tensor, tokens: int) -> torch.Tensor:
    """`times` in [0, 1], 1 is noise, moved towards noise by `time_shift`."""
    shift = time_shift(tokens)
    return shift * times / (1 + (shift - 1) * times)


def parameters(module: nn.Module) -> int:
    """Number of weights."""
    return sum(p.numel() for p in module.parameters())


def bfloat16_exact(module: nn.Module) -> None:
    """Round every weight to what bfloat16 holds, in place, so that a shipped checkpoint computes what was measured."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.bfloat16().to(parameter.dtype))


def pack(latents: torch.Tensor) -> torch.Tensor:
    """(rows, channels, height, width) → (rows, height/2 * width/2, 4 channels)."""
    rows, channels, height, width = latents.shape
    patches = latents.view(rows, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(rows, (height // 2) * (width // 2), channels * 4)


def pack_mask(masks: torch.Tensor) -> torch.Tensor:
    """(rows, height, width) of 0 and 1 → (rows, tokens, 64): a token's 8x8 pixels."""
    rows, height, width = masks.shape
    f = VAE_SCALE_FACTOR
    pixels = masks.view(rows, height // f, f, width // f, f).permute(0, 2, 4, 1, 3)
    return pack(pixels.reshape(rows, f * f, height // f, width // f).contiguous())


@torch.no_grad()
def encode(vae: AutoencoderKL, pictures: torch.Tensor) -> torch.Tensor:
    """(rows, 3, height, width) in [-1, 1] → normalised latents, the mode of the posterior."""
    latents: torch.Tensor = vae.encode(
        pictures.contiguous(memory_format=torch.channels_last)
    ).latent_dist.mode()
    normalised: torch.Tensor = (latents - vae.config.shift_factor) * vae.config.scaling_factor
    return normalised


@torch.no_grad()
def decode(vae: AutoencoderKL, latents: torch.Tensor) -> torch.Tensor:
    """The inverse of `encode`, clamped to [-1, 1]."""
    pictures: torch.Tensor = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor).sample
    return pictures.clamp(-1, 1)


def positions(side_tokens: int, row: int = 0, column: int = 0) -> torch.Tensor:
    """(tokens, 3) ids of a square grid whose first token is at (row, column)."""
    grid = torch.zeros(side_tokens, side_tokens, 3)
    grid[..., 1] = torch.arange(side_tokens)[:, None] + row
    grid[..., 2] = torch.arange(side_tokens)[None] + column
    return grid.reshape(-1, 3)


UNGUIDED: Final = 1.0
"""The guidance at which the model is the plain conditional one."""


class Painter(nn.Module):
    """Predicts the velocity noise - picture (rectified flow, Liu et al., 2022)."""

    def __init__(self, transformer: FluxTransformer2DModel, text: TextEncoders) -> None:
        super().__init__()
        self.transformer: FluxTransformer2DModel = transformer
        self.clip: CLIPTextModel = text.clip
        self.t5: T5EncoderModel = text.t5

    def read(self, clip_ids: torch.Tensor, t5_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings (rows, text tokens, width) of T5 and (rows, width) pooled of CLIP."""
        return self.t5(t5_ids)[0], self.clip(clip_ids).pooler_output

    def forward(
        self,
        noisy: torch.Tensor,
        condition: torch.Tensor,
        text: tuple[torch.Tensor, torch.Tensor],
        *,
        time: torch.Tensor,
        guidance: torch.Tensor,
        corner: tuple[int, int] = (0, 0),
    ) -> torch.Tensor:
        """Velocity (rows, tokens, 32).

        Args:
            noisy: (rows, tokens, 32) latents at `time`.
            condition: (rows, tokens, 96) latents of the masked picture, and the mask.
            text: from `read`.
            time: (rows,) in [0, 1]; 1 is noise.
            guidance: (rows,) as requests name it.
            corner: row and column of the first token; training moves it, so that every position is seen.
        """
        velocity: torch.Tensor = self.transformer(
            hidden_states=torch.cat([noisy, condition], dim=-1),
            **beside_tokens(noisy, text, time=time, guidance=guidance, corner=corner),
        )[0]
        return velocity


def beside_tokens(
    noisy: torch.Tensor,
    text: tuple[torch.Tensor, torch.Tensor],
    *,
    time: torch.Tensor,
    guidance: torch.Tensor,
    corner: tuple[int, int],
) -> dict[str, Any]:
    """What a Flux network, ControlNets too, is told beside the picture's tokens; arguments as `Painter.forward`'s."""
    embeddings, pooled = text
    side = round(noisy.shape[1] ** 0.5)
    return {
        "encoder_hidden_states": embeddings,
        "pooled_projections": pooled,
        "timestep": time,
        "guidance": guidance,
        "img_ids": positions(side, *corner).to(noisy),
        "txt_ids": torch.zeros(embeddings.shape[1], 3).to(noisy),
        "return_dict": False,
    }
