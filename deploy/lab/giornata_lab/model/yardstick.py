"""The yardstick's components, untrained: a Stable Diffusion inpainting model whose every part diffusers loads.

A latent pixel is 4x4 pixels. The UNet halves its latent twice; attention is in its two smaller levels, as in SDXL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from torch import nn
from transformers import CLIPTextModel, CLIPTokenizer

from giornata_lab.model.architecture import VAE_SCALE_FACTOR, LatentSpace
from giornata_lab.model.random import text_encoders
from giornata_lab.model.scenes import scene

LATENTS: Final = LatentSpace(channels=4, centred=False)
CONDITION_CHANNELS: Final = 1 + LATENTS.channels
"""What the UNet sees beside the noisy latent: the mask, and the masked picture's latent."""
NATIVE_PIXELS: Final = 128
WIDTHS: Final = (48, 96, 144)
HEADS: Final = 3
NORM_GROUPS: Final = 16
TEXT_TOKENS: Final = 10
TEXT_WIDTH: Final = 64
TEXT_LAYERS: Final = 1


@dataclass(frozen=True)
class TextEncoder:
    """CLIP's text encoder and its tokenizer."""

    clip: CLIPTextModel
    tokenizer: CLIPTokenizer


def unet() -> UNet2DConditionModel:
    """9 channels in, 4 out, 6.1 M weights; the output and what each block adds begin as zero (Ho et al., 2020, B)."""
    down, up = "CrossAttnDownBlock2D", "CrossAttnUpBlock2D"
    model = UNet2DConditionModel(
        sample_size=NATIVE_PIXELS // VAE_SCALE_FACTOR,
        in_channels=LATENTS.channels + CONDITION_CHANNELS,
        out_channels=LATENTS.channels,
        block_out_channels=WIDTHS,
        layers_per_block=1,
        norm_num_groups=NORM_GROUPS,
        down_block_types=("DownBlock2D", down, down),
        up_block_types=(up, up, "UpBlock2D"),
        attention_head_dim=HEADS,  # the configuration's old name for the number of heads
        cross_attention_dim=TEXT_WIDTH,
        use_linear_projection=True,
    )
    nn.init.zeros_(model.conv_out.weight)
    nn.init.zeros_(model.conv_out.bias)
    for module in model.modules():
        last = {"ResnetBlock2D": "conv2", "Transformer2DModel": "proj_out"}.get(type(module).__name__)
        if last:
            nn.init.zeros_(module.get_submodule(last).weight)
            nn.init.zeros_(module.get_submodule(last).bias)
    return model


def text_encoder() -> TextEncoder:
    """A vocabulary in which every word of the captions is one token."""
    tokenizer = text_encoders.clip_tokenizer(" ".join(scene.words()), TEXT_TOKENS)
    return TextEncoder(text_encoders.clip_encoder(tokenizer, width=TEXT_WIDTH, layers=TEXT_LAYERS), tokenizer)


def scheduler() -> DDIMScheduler:
    """Stable Diffusion's noise, predicted as epsilon; the first step is the noisiest (Lin et al., 2024, 3.3)."""
    return DDIMScheduler(
        num_train_timesteps=1000,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="epsilon",
        timestep_spacing="trailing",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )


class Inpainter(nn.Module):
    """Predicts the noise (epsilon; Ho et al., 2020)."""

    def __init__(self, unet: UNet2DConditionModel, clip: CLIPTextModel) -> None:
        super().__init__()
        self.unet: UNet2DConditionModel = unet
        self.clip: CLIPTextModel = clip

    def read(self, clip_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings (rows, text tokens, width)."""
        embeddings: torch.Tensor = self.clip(clip_ids).last_hidden_state
        return embeddings

    def forward(
        self, noisy: torch.Tensor, condition: torch.Tensor, text: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        """Noise (rows, 4, height, width) in latent pixels.

        Args:
            noisy: (rows, 4, height, width) latents at `timesteps`.
            condition: (rows, 5, height, width): the mask, and latents of the masked picture.
            text: from `read`.
            timesteps: (rows,) int64 from 0 to 999; 999 is noise.
        """
        seen = torch.cat([noisy, condition], dim=1)
        noise: torch.Tensor = self.unet(seen, timesteps, text, return_dict=False)[0]
        return noise
