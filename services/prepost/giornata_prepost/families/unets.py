"""What the pipelines of Stable Diffusion and of Stable Diffusion XL add to a row, with UNets of 4 and of 9 channels.

A token is a tile: `token_latents` latent pixels a side. Schedulers may go on drawing from the row's generator, so its
state after all draws travels as `generator`, uint8.
"""

from __future__ import annotations

import torch
from diffusers.utils.torch_utils import randn_tensor

from giornata_prepost.families.pipeline import MODE, SAMPLE, Condition, PipelineImages
from giornata_prepost.families.protocol import Tensors


class BlendedUNet(PipelineImages):
    """A UNet of 4 channels, whose pipeline blends. The pipeline draws for the masked picture too, which it never reads.

    Adds `mask` (tokens, token_latents ** 2 * latent_channels) and `generator`.
    """

    def _condition(self, picture: torch.Tensor, holes: torch.Tensor, how: str) -> Condition:
        blended = super()._condition(picture, holes, how)
        shape = (1, self.card.latent_channels, *self._mask(holes).shape[-2:])

        def condition(generator: torch.Generator) -> Tensors:
            if how == SAMPLE:
                randn_tensor(shape, generator=generator, dtype=self.pipeline.vae.dtype)
            return {**blended(generator), "generator": generator.get_state()}

        return condition


class MaskedUNet(PipelineImages):
    """A UNet of 9 channels: mask and masked picture are inputs.

    Adds `mask` (tokens, token_latents ** 2), `masked_image_latents` (tokens, token_latents ** 2 * latent_channels) and
    `generator`. At full strength the pipeline does not encode the picture: `image_latents`, which are then read for
    templates alone, are the mode.
    """

    def _picture_mode(self, how: str, strength: float) -> str:
        return MODE if strength == 1.0 else how

    def _condition(self, picture: torch.Tensor, holes: torch.Tensor, how: str) -> Condition:
        posterior = self._posterior(picture * (holes < 0.5))
        mask = self._pack(self._mask(holes))

        def condition(generator: torch.Generator) -> Tensors:
            masked = self._pack(self._latents(posterior, generator, how))
            return {"mask": mask, "masked_image_latents": masked, "generator": generator.get_state()}

        return condition
