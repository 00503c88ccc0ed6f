"""The yardstick, a Stable Diffusion inpainting model in miniature: its parts, and training of the UNet and its encoder.

A latent pixel is 4x4 pixels. The UNet halves its latent twice; attention is in its two smaller levels, as in SDXL.
Pictures of 64 pixels teach shapes and colours at a quarter of the cost; pictures of the native size follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from torch import nn
from transformers import CLIPTextModel, CLIPTokenizer

from giornata_lab.model.fill import VAE_SCALE_FACTOR, LatentSpace
from giornata_lab.model.random import text_encoders
from giornata_lab.model.scenes import Scene, scene
from giornata_lab.model.train import autoencoder
from giornata_lab.model.train.run import (
    CurriculumStage,
    SceneBatch,
    StagePlan,
    TrainingCurriculum,
    TrainingRun,
    encode_both,
    masks_of,
    optimisers,
    weighted_error,
)

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


RATES: Final = (4e-3, 2e-3)
"""Learning rates of Muon and of AdamW."""
GREATEST_RATIO: Final = 5.0
"""Signal-to-noise ratio from which an error of the picture weighs the same: gamma of Hang et al., ICCV 2023, 3.4."""
UNET: Final = TrainingCurriculum(
    "unet",
    (CurriculumStage(0.4, {64: 1.0}), CurriculumStage(1.01, {64: 0.15, 128: 0.85})),
    rows={64: 48, 128: 12},
    rates=RATES,
    average_decay=0.999,
)
STEPS: Final = 20
GUIDANCE: Final = 2.0
"""What requests get that do not say."""


@dataclass(frozen=True)
class UNetEncoder:
    """What makes scenes a batch of latent maps: the trained autoencoder and the tokenizer."""

    vae: AutoencoderKL
    text: TextEncoder

    def encode(self, scenes: Sequence[Scene]) -> SceneBatch:
        """Clean (rows, 4, height, width), condition (rows, 5, height, width), masked (rows, height * width).

        The mask's latent pixels are its pixels at their upper left corners, as the pipeline resizes it.
        """
        clean, blanked = encode_both(self.vae, scenes)
        pixels = masks_of(scenes).to(clean)[:, None]
        seen = pixels[..., ::VAE_SCALE_FACTOR, ::VAE_SCALE_FACTOR]
        touched = nn.functional.max_pool2d(pixels, VAE_SCALE_FACTOR) > 0
        return SceneBatch(
            clean.bfloat16().cpu(),
            torch.cat([seen, blanked], dim=1).bfloat16().cpu(),
            touched.flatten(1).cpu(),
            self.tokenize([scene.caption for scene in scenes]),
        )

    def tokenize(self, captions: list[str]) -> tuple[torch.Tensor]:
        """CLIP's ids (captions, TEXT_TOKENS)."""
        shape = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        return (self.text.tokenizer(captions, **shape).input_ids,)


class UNetRun(TrainingRun[Inpainter]):
    """A course of the UNet on its way."""

    def __init__(self, plan: StagePlan, course: TrainingCurriculum = UNET) -> None:
        torch.manual_seed(plan.seed)
        text = text_encoder()
        inpainter = Inpainter(unet(), text.clip).to(plan.device)
        vae = autoencoder.load(plan.folder).to(plan.device, memory_format=torch.channels_last)
        encoder = UNetEncoder(vae, text)
        super().__init__(plan, course, inpainter, encoder.encode, optimisers(inpainter, hidden, RATES))


def hidden(name: str, weights: nn.Parameter) -> bool:
    """Return whether these are a kernel or matrix inside of the UNet's blocks."""
    return "_block" in name and "time_emb_proj" not in name and weights.ndim > 1


def run(plan: StagePlan) -> None:
    """Train, going on from ``unet.pt`` in the plan's folder."""
    state = UNetRun(plan, UNET)
    state.train(partial(noise_loss, state.model, scheduler()))


def noise_loss(inpainter: Inpainter, scheduler: DDIMScheduler, batch: SceneBatch) -> torch.Tensor:
    """Squared error of the noise at a random timestep, weighted towards the mask and away from easy timesteps."""
    noise = torch.randn_like(batch.clean)
    timesteps = torch.randint(len(scheduler.alphas_cumprod), (len(noise),), device=noise.device)
    noisy = scheduler.add_noise(batch.clean, noise, timesteps)
    predicted = inpainter(noisy, batch.condition, inpainter.read(*batch.token_ids), timesteps)
    signal = scheduler.alphas_cumprod.to(noise.device)[timesteps]
    ratio = signal / (1 - signal)
    importance = ratio.clamp(max=GREATEST_RATIO) / ratio
    return weighted_error(places(predicted), places(noise), batch.masked, importance)


def places(maps: torch.Tensor) -> torch.Tensor:
    """(rows, channels, height, width) → (rows, height * width, channels)."""
    return maps.flatten(2).mT
