"""VAE and prompt encoding and VAE decoding of Stable Diffusion 1 and 2. The safety checker is not loaded."""

from __future__ import annotations

from typing import ClassVar

from diffusers import StableDiffusionInpaintPipeline

from giornata_prepost.families.protocol import SeenPictures, Tensors
from giornata_prepost.families.unets import BlendedUNet, MaskedUNet, TiledImages
from giornata_prepost.images.geometry import Size


class _StableDiffusion(TiledImages):
    kind = StableDiffusionInpaintPipeline
    left_out = ("unet", "safety_checker", "feature_extractor", "image_encoder")
    options: ClassVar = {"requires_safety_checker": False}

    def _prompt(self, prompt: str, size: Size, seen: SeenPictures) -> Tensors:  # noqa: ARG002 - protocol
        """`prompt_embeds` (text_tokens, dim), chunk after chunk."""
        if (chunks := self.chunks(prompt)) is not None:
            return {"prompt_embeds": self.pipeline.text_encoder(chunks[0])[0].flatten(0, 1)}
        embeds, _ = self.pipeline.encode_prompt(
            prompt, self.text_device, num_images_per_prompt=1, do_classifier_free_guidance=False
        )
        return {"prompt_embeds": embeds[0]}


class PlainImages(_StableDiffusion, BlendedUNet):
    """`StableDiffusionInpaintPipeline` with a UNet of 4 channels, and `StableDiffusionPipeline`."""


class InpaintImages(_StableDiffusion, MaskedUNet):
    """`StableDiffusionInpaintPipeline` with a UNet of 9 channels."""
