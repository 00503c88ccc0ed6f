"""Small checkpoints of Flux, Flux Kontext and Flux Fill with random weights."""

from __future__ import annotations

from typing import Final, TypeVar

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FluxFillPipeline,
    FluxInpaintPipeline,
    FluxKontextInpaintPipeline,
    FluxTransformer2DModel,
)

from giornata_tools.model.random.autoencoders import autoencoder
from giornata_tools.model.text import CORPUS, T5_TOKENS, text_encoders

P = TypeVar("P", FluxInpaintPipeline, FluxKontextInpaintPipeline, FluxFillPipeline)

LATENT_CHANNELS: Final = 16
VAE_SCALE_FACTOR: Final = 8
PATCH_CHANNELS: Final = 4 * LATENT_CHANNELS
"""A token is a patch of 2x2 latent pixels."""
FILL_CHANNELS: Final = 2 * PATCH_CHANNELS + 4 * VAE_SCALE_FACTOR**2
"""Fill's tokens carry the noisy latent, the masked picture's latent and the mask's 16x16 pixels."""
TEXT_WIDTH: Final = 32
HEADS: Final = 4
ROPE_AXES: Final = (8, 12, 12)
"""Head channels that encode text position, row and column; their sum is the width of a head."""

ATTENTION_GAIN: Final = 3.0
"""Freshly initialised attention is nearly uniform: changing all other tokens changes a token by 0.5 %, which a test
of exactness might not see. With this gain on queries, keys, values and outputs it is 60 %."""
ATTENTION_WEIGHTS: Final = (
    "attn.norm_q.weight",
    "attn.norm_k.weight",
    "attn.norm_added_q.weight",
    "attn.norm_added_k.weight",
    "attn.to_v.weight",
    "attn.add_v_proj.weight",
    "attn.to_out.0.weight",
    "attn.to_add_out.weight",
)


def flux(kind: type[P]) -> P:
    """Flux, Flux Kontext or Flux Fill, as `kind` says."""
    vae = autoencoder(LATENT_CHANNELS, 0.3611, 0.1159)
    text = text_encoders(CORPUS, T5_TOKENS, width=TEXT_WIDTH, layers=2)
    return kind(
        scheduler=_scheduler(),
        vae=vae,
        text_encoder=text.clip.eval(),
        tokenizer=text.clip_tokenizer,
        text_encoder_2=text.t5.eval(),
        tokenizer_2=text.t5_tokenizer,
        transformer=_transformer(FILL_CHANNELS if kind is FluxFillPipeline else PATCH_CHANNELS),
    )


def _scheduler() -> FlowMatchEulerDiscreteScheduler:
    """The configuration that FLUX.1-dev and FLUX.1-Fill-dev publish."""
    return FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000,
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )


def _transformer(in_channels: int) -> FluxTransformer2DModel:
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=in_channels,
        out_channels=PATCH_CHANNELS,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=sum(ROPE_AXES),
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        guidance_embeds=True,
        axes_dims_rope=ROPE_AXES,
    ).eval()
    for name, weight in transformer.named_parameters():
        if name.endswith(ATTENTION_WEIGHTS) or _is_single_block_output(name):
            weight.data.mul_(ATTENTION_GAIN)
    return transformer


def _is_single_block_output(name: str) -> bool:
    """A single-stream block has one projection for what its attention and its MLP add."""
    return name.startswith("single_transformer_blocks.") and name.endswith(".proj_out.weight")
