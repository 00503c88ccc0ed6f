"""Flux text-to-image checkpoints, as in `FluxInpaintPipeline`: blend with the template after each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from giornata_denoiser.families.flux.transformer import PackedFlux


class FluxInpaint(PackedFlux):
    """The network of the family `flux-inpaint`."""

    blends: Final = True

    @property
    def conditioning(self) -> Mapping[str, int]:
        """All packed as the latent is; the mask is one value per latent pixel, repeated."""
        return dict.fromkeys(("noise", "image_latents", "mask"), self.out_channels)

    def model_input(self, latents: Tensor, conditioning: Sequence[Mapping[str, Tensor]]) -> Tensor:  # noqa: ARG002 - protocol
        """The latents alone."""
        return latents

    def unmasked(self, conditioning: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Nothing is repainted."""
        return {**conditioning, "mask": torch.zeros_like(conditioning["mask"])}
