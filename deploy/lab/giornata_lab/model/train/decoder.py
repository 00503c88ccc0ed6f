"""Last stage: the autoencoder's decoder once more; the encoder stays, and what was trained on its latents stays valid.

The first stage learns from small crops, whose norms see other statistics than whole pictures do. What remains is a
smooth offset of a few 8-bit levels, which shows as a seam where the patch meets the original. Here whole pictures are
decoded, and the mean of every `PATCH` pixels counts besides the pixels.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import nn

from giornata_lab.model import architecture
from giornata_lab.model.scenes import sample
from giornata_lab.model.train import autoencoder
from giornata_lab.model.train.run import Losses, StagePlan, TrainingLoop, coder_optimisers

BATCHES: Final = ((96, 4), (128, 2), (256, 1))
"""Side in pixels and pictures a step, in turn; the last one every `LARGE_EVERY` steps."""
LARGE_EVERY: Final = 8
PATCH: Final = 8
PATCH_WEIGHT: Final = 3.0
PEAK_RATES: Final = (1e-3, 5e-4)
"""Learning rates of Muon and of AdamW."""
WARM_UP: Final = 20
NOISE: Final = 0.05
"""Standard deviation of what is added to normalised latents: the transformer's latents are not exact either."""


def run(plan: StagePlan) -> None:
    """Go on from ``decoder.pt`` or ``vae`` in the plan's folder, and replace ``vae``."""
    vae = autoencoder.load(plan.folder).to(plan.device, memory_format=torch.channels_last)
    vae.decoder.requires_grad_(requires_grad=True)
    decoder: nn.Module = vae.decoder
    loop = TrainingLoop("decoder", plan, decoder, coder_optimisers(decoder, PEAK_RATES), PEAK_RATES)
    ended = loop.run(
        lambda step: _loss(vae, _pictures(plan.seed + 2, step).to(plan.device)),
        lambda step: min(1.0, (step + 1) / WARM_UP, (plan.steps - step) / plan.steps * 1.5),
    )
    if ended:
        architecture.bfloat16_exact(vae)
        autoencoder.write(vae, plan.folder)


def _loss(vae: AutoencoderKL, x: torch.Tensor) -> Losses:
    with torch.no_grad():
        z = vae.encode(x).latent_dist.mode()
        z = z + NOISE / vae.config.scaling_factor * torch.randn_like(z) * torch.rand(len(z), 1, 1, 1).to(z)
    gap = vae.decode(z).sample - x
    pixels, edges = autoencoder.pixel_losses(gap)
    patches = nn.functional.avg_pool2d(gap, PATCH).abs().mean()
    loss = pixels + autoencoder.GRADIENT_WEIGHT * edges + PATCH_WEIGHT * patches
    return {"loss": loss, "l1": pixels, "edges": edges, "patches": patches}


def _pictures(seed: int, step: int) -> torch.Tensor:
    """A batch (count, 3, side, side) in [-1, 1]."""
    side, count = BATCHES[2] if step % LARGE_EVERY == LARGE_EVERY - 1 else BATCHES[step % 2]
    scenes = [sample(np.random.default_rng((seed, step, i)), side) for i in range(count)]
    pictures = torch.from_numpy(np.stack([scene.after for scene in scenes]))
    whole: torch.Tensor = pictures.permute(0, 3, 1, 2).float() / 127.5 - 1
    return whole.contiguous(memory_format=torch.channels_last)
