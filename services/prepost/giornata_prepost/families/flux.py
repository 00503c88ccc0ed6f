"""VAE and prompt encoding and VAE decoding of Flux and Flux Fill."""

from __future__ import annotations

import torch
from diffusers import FluxFillPipeline, FluxInpaintPipeline, FluxKontextInpaintPipeline

from giornata.tensors import PROMPT_MASK
from giornata.wire.adapters import ControlInput
from giornata_prepost.families.controls import ControlledImages
from giornata_prepost.families.pipeline import MODE, SAMPLE, GeneratingImages, ReferringImages
from giornata_prepost.families.protocol import Condition, SeenPictures, Tensors
from giornata_prepost.images.geometry import Size


class FluxImages(ControlledImages):
    """The image side that all kinds of Flux share. Control images are as in `FluxControlNetInpaintPipeline`."""

    control_inputs = frozenset({ControlInput.USUAL, ControlInput.PIXELS})

    def _prompt(self, prompt: str, size: Size, seen: SeenPictures) -> Tensors:  # noqa: ARG002 - protocol
        """`prompt_embeds` (text_tokens, joint_dim), `pooled_prompt_embeds` (pooled_dim,) and the prompt's mask.

        See :data:`giornata.tensors.PROMPT_MASK`.
        """
        embeds, pooled, _ = self.pipeline.encode_prompt(
            prompt=prompt,
            prompt_2=None,
            device=self.text_device,
            max_sequence_length=self.card.max_text_tokens,
        )
        return {
            "prompt_embeds": embeds[0],
            "pooled_prompt_embeds": pooled[0],
            PROMPT_MASK: self._mask_of_prompt(prompt),
        }

    def _mask_of_prompt(self, prompt: str) -> torch.Tensor:
        """(text_tokens,) uint8: the attention mask of what the pipeline's `encode_prompt` tokenizes."""
        tokenized = self.pipeline.tokenizer_2(
            prompt,
            padding="max_length",
            max_length=self.card.max_text_tokens,
            truncation=True,
            return_tensors="pt",
        )
        mask: torch.Tensor = tokenized.attention_mask[0]
        return mask.to(torch.uint8)


class FluxInpaintImages(FluxImages, GeneratingImages):
    """`FluxInpaintPipeline`: adds `mask` (tokens, 4 * latent_channels), one value a latent pixel, repeated.

    The pipeline encodes the masked picture too, which no step reads. It generates as `FluxPipeline`.
    """

    kind = FluxInpaintPipeline
    draws_unread = True


class FluxKontextImages(FluxImages, GeneratingImages, ReferringImages):
    """`FluxKontextInpaintPipeline`: adds the mask as :class:`FluxInpaintImages`.

    Of a picture as a whole, at full strength, that is `FluxKontextPipeline`.
    """

    kind = FluxKontextInpaintPipeline
    draws_unread = True

    def _picture_mode(self, strength: float, *, whole: bool) -> str:  # noqa: ARG002 - protocol
        """The pipeline takes the mode of the posterior."""
        return MODE


class FluxFillImages(FluxImages):
    """`FluxFillPipeline`: adds `masked_image_latents` (tokens, 4 * latent_channels) and the mask in pixels.

    `mask` is (tokens, 4 * vae_scale_factor ** 2).
    """

    kind = FluxFillPipeline

    def _condition(self, picture: torch.Tensor, holes: torch.Tensor, *, modes: bool) -> Condition:
        """A posterior sample of the masked picture."""
        posterior = self._posterior(picture * (1 - holes))
        pixels = torch.nn.functional.pixel_unshuffle(holes, self.card.vae_scale_factor)
        mask = self._pack(pixels.to(self.device, self.dtype))

        def condition(generator: torch.Generator) -> Tensors:
            masked = self._pack(self._latents(posterior, generator, SAMPLE))
            return {"masked_image_latents": self._with_modes(masked, posterior, modes=modes), "mask": mask}

        return condition
