"""The families of Stable Diffusion and of Stable Diffusion XL, with UNets of 4 and of 9 channels.

A token is a tile: `token_latents` latent pixels a side.
"""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Any, ClassVar

import torch

from giornata.wire.adapters import ControlInput
from giornata_prepost.families.pipeline import (
    MODE,
    SAMPLE,
    Condition,
    ImageModel,
    SeenPictures,
    Tensors,
    tokens_of,
)
from giornata_prepost.images.pictures import Size


class TiledImages(ImageModel):
    """Pictures for a UNet: text is attended to, and passes no block. ControlNets see pixels."""

    control_inputs = frozenset({ControlInput.USUAL})
    control_pixels = True

    def chunks(self, prompt: str) -> list[torch.Tensor] | None:
        """A prompt that is longer than its encoders, as token ids for each of them: (chunks, encoder's length).

        Each chunk begins and ends as a whole prompt does, and is encoded by itself, as A1111 and Compel do. None where
        one chunk is enough: then the pipeline's own encoding is that.
        """
        tokenizers = [
            one
            for name in ("tokenizer", "tokenizer_2")
            if (one := getattr(self.pipeline, name, None)) is not None
        ]
        ids = [tokens_of(one, prompt)[: self.card.max_prompt_tokens] for one in tokenizers]
        room = tokenizers[0].model_max_length - 2
        count = ceil(max(map(len, ids)) / room)
        if count <= 1:
            return None
        return [
            torch.tensor(
                [_framed(one, each[n * room : (n + 1) * room]) for n in range(count)], device=self.text_device
            )
            for one, each in zip(tokenizers, ids, strict=True)
        ]

    def text_tokens(self, text: Tensors) -> int:  # noqa: ARG002 - one signature
        """None."""
        return 0


class BlendedUNet(TiledImages):
    """A UNet of 4 channels, whose inpainting pipeline blends; it generates, too.

    Adds `mask` (tokens, token_latents ** 2 * latent_channels).
    """

    draws_unread = True


class MaskedUNet(TiledImages):
    """A UNet of 9 channels: mask and masked picture are inputs.

    Adds `mask` (tokens, token_latents ** 2) and `masked_image_latents` (tokens, token_latents ** 2 * latent_channels).
    At full strength the pipeline does not encode the picture: `image_latents`, which are then read for
    templates alone, are the mode.
    """

    def _mode(self, strength: float, *, whole: bool) -> str:  # noqa: ARG002 - one signature
        return MODE if strength == 1.0 else SAMPLE

    def _condition(self, picture: torch.Tensor, holes: torch.Tensor, *, modes: bool) -> Condition:
        posterior = self._posterior(picture * (holes < 0.5))
        mask = self._pack(self._mask(holes))

        def condition(generator: torch.Generator) -> Tensors:
            masked = self._pack(self._latents(posterior, generator, SAMPLE))
            return {"mask": mask, "masked_image_latents": self._with_modes(masked, posterior, modes=modes)}

        return condition


def _framed(tokenizer: Any, ids: list[int]) -> list[int]:
    """A chunk as CLIP's pipelines tokenize a prompt: between start and end, padded to the encoder's length."""
    ids = [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id]
    return ids + [tokenizer.pad_token_id] * (tokenizer.model_max_length - len(ids))


class _StableDiffusion(TiledImages):
    """The safety checker is not loaded."""

    kind = "StableDiffusionInpaintPipeline"
    left_out = ("unet", "safety_checker", "feature_extractor", "image_encoder")
    options: ClassVar = {"requires_safety_checker": False}

    def _prompt(self, prompt: str, size: Size, seen: SeenPictures) -> Tensors:  # noqa: ARG002 - one signature
        """`prompt_embeds` (text_tokens, dim), chunk after chunk."""
        if (chunks := self.chunks(prompt)) is not None:
            return {"prompt_embeds": self.pipeline.text_encoder(chunks[0])[0].flatten(0, 1)}
        embeds, _ = self.pipeline.encode_prompt(
            prompt, self.text_device, num_images_per_prompt=1, do_classifier_free_guidance=False
        )
        return {"prompt_embeds": embeds[0]}


class SDImages(_StableDiffusion, BlendedUNet):
    """`StableDiffusionInpaintPipeline` with a UNet of 4 channels, and `StableDiffusionPipeline`."""


class SDInpaintImages(_StableDiffusion, MaskedUNet):
    """`StableDiffusionInpaintPipeline` with a UNet of 9 channels."""


class _StableDiffusionXL(TiledImages):
    """There is no watermark."""

    kind = "StableDiffusionXLInpaintPipeline"
    left_out = ("unet", "feature_extractor", "image_encoder")
    options: ClassVar = {"add_watermarker": False}
    text_varies_with_size = True

    def __init__(self, folder: Path, *more: Any) -> None:
        super().__init__(folder, *more)
        # the pipeline too encodes in float32, since activations overflow in 16 bits
        if self.dtype != torch.float32 and self.pipeline.vae.config.force_upcast:
            self.pipeline.vae.to(torch.float32)

    def _prompt(self, prompt: str, size: Size, seen: SeenPictures) -> Tensors:  # noqa: ARG002 - one signature
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


class SDXLImages(_StableDiffusionXL, BlendedUNet):
    """`StableDiffusionXLInpaintPipeline` with a UNet of 4 channels, and `StableDiffusionXLPipeline`."""


class SDXLInpaintImages(_StableDiffusionXL, MaskedUNet):
    """`StableDiffusionXLInpaintPipeline` with a UNet of 9 channels."""
