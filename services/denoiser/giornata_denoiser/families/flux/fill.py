"""Flux Fill checkpoints, as in `FluxFillPipeline`: masked picture and mask are input channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from giornata_denoiser.families.flux.transformer import PackedFlux


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

    def model_input(self, latent: Tensor, conditioning: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Latent, masked picture's latents, mask: written once, from each row's own tensors."""
        image = latent.new_empty(len(latent), self.in_channels)
        width = self.out_channels
        image[:, :width] = latent
        torch.cat([row["masked_image_latents"] for row in conditioning], out=image[:, width : 2 * width])
        torch.cat([row["mask"] for row in conditioning], out=image[:, 2 * width :])
        return image

    def unmasked(self, conditioning: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The masked picture is the picture."""
        return {
            **conditioning,
            "masked_image_latents": conditioning["image_latents"],
            "mask": torch.zeros_like(conditioning["mask"]),
        }

    def after_step(self, latent: Tensor, conditioning: Mapping[str, Tensor], next_sigma: Tensor) -> Tensor:  # noqa: ARG002 - protocol
        """Nothing: Fill never blends."""
        return latent
