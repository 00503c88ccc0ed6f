"""The kinds of UNet checkpoints: plain models, which inpaint by blending, and inpainting models; safetensors only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor

from giornata_denoiser.choices import WeightQuantization
from giornata_denoiser.families import weights
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.families.sampling.schedules import DiscreteTime, discrete_scheduler_config
from giornata_denoiser.families.unet.network import TiledUnet

SIDE: Final = 8
"""Latent pixels a side of a tile; Stable Diffusion 1 and 2 have four levels."""
SIDE_XL: Final = 4
"""Those of SDXL, which has three."""


class UnetInpaint(TiledUnet):
    """A plain text-to-image UNet, as in `StableDiffusionInpaintPipeline`: each step ends with a blend."""

    blends: Final = True

    @property
    def conditioning(self) -> Mapping[str, int]:
        """All as the latent is; the mask is one value per latent pixel, repeated over the channels."""
        return dict.fromkeys(("noise", "image_latents", "mask"), self.out_channels * self.side**2)

    def model_input(self, latents: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:  # noqa: ARG002 - protocol
        """The latents alone."""
        return latents

    def unmasked(self, conditioning: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Nothing is repainted."""
        return {**conditioning, "mask": torch.zeros_like(conditioning["mask"])}


class UnetFill(TiledUnet):
    """An inpainting UNet: mask and masked picture are input channels behind the latent's."""

    blends: Final = False

    @property
    def conditioning(self) -> Mapping[str, int]:
        """The mask is one value per latent pixel."""
        latent = self.out_channels * self.side**2
        return {
            "noise": latent,
            "image_latents": latent,
            "masked_image_latents": latent,
            "mask": self.side**2,
        }

    def model_input(self, latents: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:
        """Latents, mask, masked picture's latents: the channels' order in diffusers."""
        return torch.cat((latents, conditioning["mask"], conditioning["masked_image_latents"]), dim=1)

    def unmasked(self, conditioning: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The masked picture is the picture."""
        return {
            **conditioning,
            "masked_image_latents": conditioning["image_latents"],
            "mask": torch.zeros_like(conditioning["mask"]),
        }


def network_of(unet: Any) -> UnetInpaint | UnetFill:
    """The network over a `UNet2DConditionModel`.

    Raises:
        ValueError: the UNet is of a kind that is not served; says what is.
    """
    latent, received = int(unet.config.out_channels), int(unet.config.in_channels)
    kinds: dict[int, type[UnetInpaint | UnetFill]] = {latent: UnetInpaint, 2 * latent + 1: UnetFill}
    if received not in kinds:
        raise ValueError(f"the UNet has {received} input channels; served are {sorted(kinds)}")
    return kinds[received](unet, SIDE_XL if unet.config.addition_embed_type == "text_time" else SIDE)


def load(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    quantized: WeightQuantization = WeightQuantization.OFF,
) -> ModelFamily:
    """The family of a checkpoint; raises as :func:`giornata_denoiser.checkpoint.load`."""
    if quantized is not WeightQuantization.OFF:
        raise ValueError(f"a UNet is not quantised; received {quantized}, accepted {WeightQuantization.OFF}")
    network = network_of(
        weights.open_network(UNet2DConditionModel, folder, "unet", dtype=dtype, device=device)
    )
    return ModelFamily(network.text, DiscreteTime(discrete_scheduler_config(folder)), network)
