"""The trained parts that work on latents, together: the text encoder and the UNet.

One forward is what `StableDiffusionInpaintPipeline` computes for one step, from token ids and latents.
"""

from __future__ import annotations

import torch
from diffusers import UNet2DConditionModel
from torch import nn
from transformers import CLIPTextModel

from giornata_lab.model.yardstick import architecture


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


@torch.no_grad()
def denoise(
    inpainter: Inpainter,
    condition: torch.Tensor,
    text: tuple[torch.Tensor, torch.Tensor],
    noise: torch.Tensor,
    *,
    steps: int,
    guidance: float,
) -> torch.Tensor:
    """The latents that `steps` of the checkpoint's scheduler make of `noise`, (rows, 4, height, width).

    Args:
        inpainter: what predicts.
        condition: as its forward takes it.
        text: embeddings of the captions and of no caption, (rows, text tokens, width) each.
        noise: (rows, 4, height, width).
        steps: forwards of twice the rows.
        guidance: classifier-free scale (Ho & Salimans, 2022).
    """
    scheduler = architecture.scheduler()
    scheduler.set_timesteps(steps, device=noise.device)
    asked, blank = text
    both, twice = torch.cat([blank, asked]), torch.cat([condition, condition])
    x = noise
    for timestep in scheduler.timesteps:
        free, wanted = inpainter(torch.cat([x, x]), twice, both, timestep.expand(2 * len(x))).chunk(2)
        x = scheduler.step(free + guidance * (wanted - free), timestep, x, return_dict=False)[0]
    return x
