"""Flux Fill checkpoints, as in `FluxFillPipeline`: masked picture and mask are input channels."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from giornata_denoiser.families.flux import PackedFlux


class FluxFill(PackedFlux):
    """The family `flux-fill`."""

    @property
    def conditioning(self) -> Mapping[str, int]:
        """The mask is pixel-unshuffled: 16x16 pixels per token for an autoencoder of factor 8."""
        latent = self.out_channels
        return {
            "noise": latent,
            "image_latents": latent,
            "masked_image_latents": latent,
            "mask": self.in_channels - 2 * latent,
        }

    def model_input(self, latent: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:
        """Latent, masked picture's latents, mask."""
        return torch.cat((latent, conditioning["masked_image_latents"], conditioning["mask"]), dim=1)

    def after_step(self, latent: Tensor, conditioning: Mapping[str, Tensor], next_sigma: Tensor) -> Tensor:  # noqa: ARG002 - protocol
        """Nothing: Fill never blends."""
        return latent
