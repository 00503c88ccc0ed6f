"""Builds a small Flux checkpoint with random weights, in diffusers' layout and without a download.

``python -m giornata_tools.model.random.build FOLDER --family flux-inpaint|flux-fill [--seed 0]``

The folder loads with `FluxInpaintPipeline.from_pretrained` or `FluxFillPipeline.from_pretrained` like a published
checkpoint; equal seeds give equal bytes. What it paints is texture: it exercises the system, it knows nothing of
pictures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click
import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxFillPipeline,
    FluxInpaintPipeline,
    FluxTransformer2DModel,
)

from giornata.families import Family
from giornata_tools.model.text import CORPUS, T5_TOKENS, text_encoders

LATENT_CHANNELS: Final = 16
VAE_SCALE_FACTOR: Final = 8
PATCH_CHANNELS: Final = 4 * LATENT_CHANNELS
"""A token is a patch of 2x2 latent pixels."""
FILL_CHANNELS: Final = 2 * PATCH_CHANNELS + 4 * VAE_SCALE_FACTOR**2
"""Fill's tokens carry the noisy latent, the masked picture's latent and the mask's 16x16 pixels."""
TEXT_WIDTH: Final = 32
NATIVE_PIXELS: Final = 256
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


def build(family: Family, folder: Path, seed: int = 0) -> None:
    """Write a checkpoint of `family` into `folder`, which is made where it does not exist.

    Args:
        family: decides the pipeline and the transformer's input channels.
        folder: receives `model_index.json` and one sub-folder per component.
        seed: of every weight; the process's own random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = _pipeline(family)
    pipeline.save_pretrained(folder, safe_serialization=True)


def _pipeline(family: Family) -> FluxInpaintPipeline | FluxFillPipeline:
    vae = _vae()
    text = text_encoders(CORPUS, T5_TOKENS, width=TEXT_WIDTH, layers=2)
    fill = family is Family.FLUX_FILL
    kind = FluxFillPipeline if fill else FluxInpaintPipeline
    return kind(
        scheduler=_scheduler(),
        vae=vae,
        text_encoder=text.clip.eval(),
        tokenizer=text.clip_tokenizer,
        text_encoder_2=text.t5.eval(),
        tokenizer_2=text.t5_tokenizer,
        transformer=_transformer(FILL_CHANNELS if fill else PATCH_CHANNELS),
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


def _vae() -> AutoencoderKL:
    widths = (8, 16, 16, 16)
    return AutoencoderKL(
        latent_channels=LATENT_CHANNELS,
        block_out_channels=widths,
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        norm_num_groups=4,
        sample_size=NATIVE_PIXELS,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    ).eval()


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


@click.command(context_settings={"show_default": True})
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--family", type=click.Choice([str(family) for family in Family]), default=str(Family.FLUX_INPAINT)
)
@click.option("--seed", type=int, default=0, help="Of the weights.")
def main(folder: Path, family: str, seed: int) -> None:
    """Build a checkpoint with random weights in FOLDER."""
    build(Family(family), folder, seed)


if __name__ == "__main__":
    main()
