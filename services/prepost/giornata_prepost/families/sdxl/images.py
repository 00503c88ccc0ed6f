"""VAE and prompt encoding and VAE decoding of Stable Diffusion XL, without a watermark."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import StableDiffusionXLInpaintPipeline

from giornata_prepost.families.protocol import SeenPictures, Tensors
from giornata_prepost.families.unets import BlendedUNet, MaskedUNet, TiledImages
from giornata_prepost.images.geometry import Size


class _StableDiffusionXL(TiledImages):
    kind = StableDiffusionXLInpaintPipeline
    left_out = ("unet", "feature_extractor", "image_encoder")
    options: ClassVar = {"add_watermarker": False}
    text_varies_with_size = True

    def __init__(self, folder: Path, *more: Any) -> None:
        super().__init__(folder, *more)
        # the pipeline too encodes in float32, since activations overflow in 16 bits
        if self.dtype != torch.float32 and self.pipeline.vae.config.force_upcast:
            self.pipeline.vae.to(torch.float32)

    def _prompt(self, prompt: str, size: Size, seen: SeenPictures) -> Tensors:  # noqa: ARG002 - protocol
        """`prompt_embeds` (text_tokens, dim), `pooled_prompt_embeds` (pooled_dim,) and `add_time_ids` (6,).

        The latter are original height and width, crop, and target height and width: those of the model's picture. Of a
        prompt in chunks the first is pooled.
        """
        if (chunks := self.chunks(prompt)) is None:
            embeds, _, pooled, _ = self.pipeline.encode_prompt(
                prompt, device=self.text_device, do_classifier_free_guidance=False
            )
        else:
            encoders = (self.pipeline.text_encoder, self.pipeline.text_encoder_2)
            made = [one(ids, output_hidden_states=True) for one, ids in zip(encoders, chunks, strict=True)]
            embeds = torch.cat([one.hidden_states[-2].flatten(0, 1) for one in made], dim=-1)[None]
            pooled = made[-1][0]
        sides = [size.height, size.width, 0, 0, size.height, size.width]
        ids = torch.tensor(sides, dtype=embeds.dtype)
        return {"prompt_embeds": embeds[0], "pooled_prompt_embeds": pooled[0], "add_time_ids": ids}

    def _unguided(self, negative_prompt: str | None, size: Size, seen: SeenPictures) -> Tensors:
        """Zeros where none was given and the checkpoint has `force_zeros_for_empty_prompt`."""
        text = super()._unguided(negative_prompt, size, seen)
        if negative_prompt is None and self.pipeline.config.force_zeros_for_empty_prompt:
            for name in ("prompt_embeds", "pooled_prompt_embeds"):
                text[name] = torch.zeros_like(text[name])
        return text


class PlainImages(_StableDiffusionXL, BlendedUNet):
    """`StableDiffusionXLInpaintPipeline` with a UNet of 4 channels, and `StableDiffusionXLPipeline`."""


class InpaintImages(_StableDiffusionXL, MaskedUNet):
    """`StableDiffusionXLInpaintPipeline` with a UNet of 9 channels."""
