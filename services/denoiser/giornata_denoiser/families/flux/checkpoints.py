"""Kinds of Flux checkpoints: text-to-image models, which inpaint, Kontext, and Fill; safetensors only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor

from giornata_denoiser.choices import WeightQuantization
from giornata_denoiser.families import weights
from giornata_denoiser.families.flux.transformer import PackedFlux
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.families.references import ReferencePolicy
from giornata_denoiser.families.sampling.flow_matching import FlowMatching, scheduler_config, shifted_by_size


class FluxInpaint(PackedFlux):
    """The network of the family `flux-inpaint`, as in `FluxInpaintPipeline`: it blends after each step."""

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


class FluxKontext(FluxInpaint):
    """The network of the family `flux-kontext`, as in `FluxKontextInpaintPipeline`: a clean picture stands beside."""

    references = ReferencePolicy(replaced=True)


class FluxFill(PackedFlux):
    """The network of the family `flux-fill`, as in `FluxFillPipeline`: masked picture and mask are input channels."""

    blends: Final = False

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

    def model_input(self, latents: Tensor, conditioning: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Latents, masked picture's latents, mask: written once, from each sequence's own tensors."""
        image = latents.new_empty(len(latents), self.in_channels)
        width = self.out_channels
        image[:, :width] = latents
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


def load(
    network: type[FluxInpaint | FluxFill],
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    quantized: WeightQuantization = WeightQuantization.OFF,
) -> ModelFamily:
    """The family of a checkpoint; raises as :func:`giornata_denoiser.checkpoint.load`."""
    loaded = network(
        weights.loaded(
            FluxTransformer2DModel, folder, "transformer", dtype=dtype, device=device, quantized=quantized
        )
    )
    return ModelFamily(loaded.text, FlowMatching(scheduler_config(folder), shifted_by_size), loaded)


inpaint = partial(load, FluxInpaint)
kontext = partial(load, FluxKontext)
fill = partial(load, FluxFill)
