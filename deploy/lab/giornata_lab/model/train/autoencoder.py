"""First and last stage: the autoencoder, from pictures to latents and back.

The first learns by L1 on pixels and on their gradients (edges of shapes are thin) and a slight pull to the unit
Gaussian. A part of the pictures has its mask blanked, since Fill's conditioning encodes such pictures.

The last trains the decoder once more; the encoder stays, and what was trained on its latents stays valid. The first
stage learns from small crops, whose norms see other statistics than whole pictures do. What remains is a smooth offset
of a few 8-bit levels, which shows as a seam where the patch meets the original. Here whole pictures are decoded, and
the mean of every `PATCH` pixels counts besides the pixels.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import nn

from giornata_lab.model.fill import FILL_LATENTS, LatentSpace, autoencoder, bfloat16_exact
from giornata_lab.model.scenes import sample
from giornata_lab.model.train.run import Losses, StagePlan, TrainingLoop, coder_optimisers, cosine

SIDE: Final = 64
CROPS: Final = ((0.75, 32, 16), (1.0, 64, 6))
"""Until which part of the run, side in pixels, pictures a step: small crops teach most of it, and cheaply."""
PEAK_RATES: Final = (4e-3, 2e-3)
"""Learning rates of Muon and of AdamW."""
KL_WEIGHT: Final = 1e-4
GRADIENT_WEIGHT: Final = 0.5
POOL: Final = 4096
REFRESH_EVERY: Final = 16
REFRESHED: Final = 32
"""Every so many steps, so many pictures of the pool are rendered again."""
MEASURED: Final = 512


def run(plan: StagePlan, space: LatentSpace = FILL_LATENTS) -> None:
    """Train, going on from ``autoencoder.pt`` in the plan's folder, and write ``vae`` there.

    Does nothing where that is done: measuring the latents again would move what was trained on them.
    """
    steps, seed, device = plan.steps, plan.seed, plan.device
    torch.manual_seed(seed)
    vae = autoencoder(space).to(device, memory_format=torch.channels_last)
    loop = TrainingLoop("autoencoder", plan, vae, coder_optimisers(vae, PEAK_RATES), PEAK_RATES)
    first = loop.step
    if first >= steps and (plan.folder / "vae").exists():
        return
    pictures = _pictures((seed, first), POOL).to(device)

    def loss_of(step: int) -> Losses:
        if step % REFRESH_EVERY == 0 and step > first:
            place = (step // REFRESH_EVERY * REFRESHED) % POOL
            pictures[place : place + REFRESHED] = _pictures((seed + 1, step), REFRESHED).to(device)
        return _loss(vae, _crops(pictures, step / steps).float() / 127.5 - 1)

    if loop.run(loss_of, lambda step: cosine(step, steps)):
        _finish(vae, pictures[:MEASURED], plan.folder, space)


def _crops(pictures: torch.Tensor, progress: float) -> torch.Tensor:
    """A batch (count, 3, side, side) of random crops."""
    side, count = next((side, count) for until, side, count in CROPS if progress < until)
    chosen = torch.randint(len(pictures), (count,)).tolist()
    corners = torch.randint(SIDE - side + 1, (count, 2)).tolist()
    return torch.stack(
        [pictures[i, :, y : y + side, x : x + side] for i, (y, x) in zip(chosen, corners, strict=True)]
    )


def _loss(vae: AutoencoderKL, x: torch.Tensor) -> Losses:
    x = x.contiguous(memory_format=torch.channels_last)
    posterior = vae.encode(x).latent_dist  # float32: small convolutions are slower in bfloat16 on a CPU
    y = vae.decode(posterior.sample()).sample
    pixels, edges = pixel_losses(y - x)
    kl = posterior.kl().mean() / (x.shape[2] * x.shape[3])
    return {"loss": pixels + GRADIENT_WEIGHT * edges + KL_WEIGHT * kl, "l1": pixels, "edges": edges, "kl": kl}


def pixel_losses(gap: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """L1 of a difference of pictures (rows, 3, height, width), and of its gradients."""
    return gap.abs().mean(), gap.diff(dim=2).abs().mean() + gap.diff(dim=3).abs().mean()


def _pictures(seed: tuple[int, int], count: int) -> torch.Tensor:
    """(count, 3, side, side) uint8."""
    pictures = []
    for i in range(count):
        rng = np.random.default_rng((*seed, i))
        scene = sample(rng, SIDE)
        masked = np.where(scene.mask[..., None], np.uint8(127), scene.after) if i % 4 == 0 else scene.after
        pictures.append(torch.from_numpy(masked.astype(np.uint8)).permute(2, 0, 1))
    return torch.stack(pictures)


@torch.no_grad()
def _finish(vae: AutoencoderKL, pictures: torch.Tensor, folder: Path, space: LatentSpace) -> None:
    """Measure mean and deviation of the latents, and write the component."""
    vae.eval()
    bfloat16_exact(vae)
    x = pictures.float() / 127.5 - 1
    parts = [vae.encode(part).latent_dist.mode() for part in torch.split(x, 64)]
    latents = torch.cat(parts)
    mean = latents.mean() if space.centred else torch.zeros(())
    deviation = (latents - mean).square().mean().sqrt()
    vae.register_to_config(scaling_factor=float(1 / deviation), shift_factor=float(mean))
    restored = torch.cat([vae.decode(part).sample for part in parts]).clamp(-1, 1)
    psnr = -10 * math.log10(float(((restored - x) / 2).square().mean()))
    print(
        f"autoencoder PSNR {psnr:.2f} dB, latent std per channel {latents.std((0, 2, 3)).tolist()}",
        flush=True,
    )
    write(vae, folder)


def write(vae: AutoencoderKL, folder: Path) -> None:
    """Put ``vae`` into `folder`, in bfloat16; a kill leaves the old one or none."""
    unfinished = folder / "vae.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    vae.to(torch.bfloat16).save_pretrained(unfinished)
    shutil.rmtree(folder / "vae", ignore_errors=True)
    unfinished.rename(folder / "vae")


def load(folder: Path) -> AutoencoderKL:
    """The trained component in float32, frozen; its configuration does not tell of `folder`."""
    saved: Any = AutoencoderKL.from_pretrained(folder / "vae", dtype=torch.float32)
    vae = autoencoder(replace(FILL_LATENTS, channels=saved.config.latent_channels))
    vae.load_state_dict(saved.state_dict())
    vae.register_to_config(scaling_factor=saved.config.scaling_factor, shift_factor=saved.config.shift_factor)
    frozen: AutoencoderKL = vae.eval().requires_grad_(requires_grad=False)
    return frozen


BATCHES: Final = ((96, 4), (128, 2), (256, 1))
"""Side in pixels and pictures a step, in turn; the last one every `LARGE_EVERY` steps."""
LARGE_EVERY: Final = 8
PATCH: Final = 8
PATCH_WEIGHT: Final = 3.0
DECODER_RATES: Final = (1e-3, 5e-4)
"""Learning rates of Muon and of AdamW."""
DECODER_WARM_UP: Final = 20
NOISE: Final = 0.05
"""Standard deviation of what is added to normalised latents: the transformer's latents are not exact either."""


def refine(plan: StagePlan) -> None:
    """Go on from ``decoder.pt`` or ``vae`` in the plan's folder, and replace ``vae``."""
    vae = load(plan.folder).to(plan.device, memory_format=torch.channels_last)
    vae.decoder.requires_grad_(requires_grad=True)
    decoder: nn.Module = vae.decoder
    loop = TrainingLoop("decoder", plan, decoder, coder_optimisers(decoder, DECODER_RATES), DECODER_RATES)
    ended = loop.run(
        lambda step: _decoder_loss(vae, _whole_pictures(plan.seed + 2, step).to(plan.device)),
        lambda step: min(1.0, (step + 1) / DECODER_WARM_UP, (plan.steps - step) / plan.steps * 1.5),
    )
    if ended:
        bfloat16_exact(vae)
        write(vae, plan.folder)


def _decoder_loss(vae: AutoencoderKL, x: torch.Tensor) -> Losses:
    with torch.no_grad():
        z = vae.encode(x).latent_dist.mode()
        z = z + NOISE / vae.config.scaling_factor * torch.randn_like(z) * torch.rand(len(z), 1, 1, 1).to(z)
    gap = vae.decode(z).sample - x
    pixels, edges = pixel_losses(gap)
    patches = nn.functional.avg_pool2d(gap, PATCH).abs().mean()
    loss = pixels + GRADIENT_WEIGHT * edges + PATCH_WEIGHT * patches
    return {"loss": loss, "l1": pixels, "edges": edges, "patches": patches}


def _whole_pictures(seed: int, step: int) -> torch.Tensor:
    """A batch (count, 3, side, side) in [-1, 1]."""
    side, count = BATCHES[2] if step % LARGE_EVERY == LARGE_EVERY - 1 else BATCHES[step % 2]
    scenes = [sample(np.random.default_rng((seed, step, i)), side) for i in range(count)]
    pictures = torch.from_numpy(np.stack([scene.after for scene in scenes]))
    whole: torch.Tensor = pictures.permute(0, 3, 1, 2).float() / 127.5 - 1
    return whole.contiguous(memory_format=torch.channels_last)
