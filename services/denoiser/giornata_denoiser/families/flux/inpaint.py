"""Flux text-to-image checkpoints, as in `FluxInpaintPipeline`: blend with the template after each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from giornata_denoiser.families.flux.transformer import PackedFlux
from giornata_denoiser.rows.sigmas import blend


class FluxInpaint(PackedFlux):
    """The family `flux-inpaint`."""

    @property
    def conditioning(self) -> Mapping[str, int]:
        """All packed as the latent is; the mask is one value per latent pixel, repeated."""
        return dict.fromkeys(("noise", "image_latents", "mask"), self.out_channels)

    def model_input(self, latent: Tensor, conditioning: Sequence[Mapping[str, Tensor]]) -> Tensor:  # noqa: ARG002 - protocol
        """The latent alone."""
        return latent

    def unmasked(self, conditioning: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Nothing is repainted."""
        return {**conditioning, "mask": torch.zeros_like(conditioning["mask"])}

    def after_step(self, latent: Tensor, conditioning: Mapping[str, Tensor], next_sigma: Tensor) -> Tensor:
        """Outside the mask, the template at the next noise level; after the last step, the template."""
        return blend(
            latent, conditioning["image_latents"], conditioning["noise"], conditioning["mask"], next_sigma
        )
