"""The yardstick's second stage: the UNet and its text encoder, by denoising encoded scenes.

Pictures of 64 pixels teach shapes and colours at a quarter of the cost; pictures of the native size follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from diffusers import AutoencoderKL, DDIMScheduler
from torch import nn

from giornata_lab.model import yardstick
from giornata_lab.model.architecture import VAE_SCALE_FACTOR
from giornata_lab.model.scenes import Scene
from giornata_lab.model.train import autoencoder
from giornata_lab.model.train.pool import SceneBatch, encode_both, masks_of
from giornata_lab.model.train.run import (
    CurriculumStage,
    StagePlan,
    TrainingCurriculum,
    TrainingRun,
    optimisers,
    weighted_error,
)
from giornata_lab.model.yardstick import Inpainter, TextEncoder

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
        text = yardstick.text_encoder()
        inpainter = Inpainter(yardstick.unet(), text.clip).to(plan.device)
        vae = autoencoder.load(plan.folder).to(plan.device, memory_format=torch.channels_last)
        super().__init__(
            plan, course, inpainter, UNetEncoder(vae, text), optimisers(inpainter, hidden, RATES)
        )


def hidden(name: str, weights: nn.Parameter) -> bool:
    """Return whether these are a kernel or matrix inside of the UNet's blocks."""
    return "_block" in name and "time_emb_proj" not in name and weights.ndim > 1


def run(plan: StagePlan) -> None:
    """Train, going on from ``unet.pt`` in the plan's folder."""
    state = UNetRun(plan, UNET)
    state.train(partial(noise_loss, state.model, yardstick.scheduler()))


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
