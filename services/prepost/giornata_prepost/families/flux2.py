"""VAE and prompt encoding and VAE decoding of Flux.2 and Klein."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import Flux2KleinInpaintPipeline, Flux2Pipeline
from diffusers.utils.torch_utils import randn_tensor
from torch.nn.functional import interpolate, pixel_shuffle

from giornata_prepost.families.pipeline import MODE, GeneratingImages, ReferringImages
from giornata_prepost.families.processors import PixtralTextProcessor
from giornata_prepost.families.protocol import Condition, SeenPictures, Tensors
from giornata_prepost.images.geometry import Size


class KleinImages(GeneratingImages, ReferringImages):
    """`Flux2KleinInpaintPipeline`: adds `mask` (tokens, 4 * latent_channels), one value a token, repeated."""

    kind = Flux2KleinInpaintPipeline

    def _prompt(self, prompt: str, size: Size, seen: SeenPictures) -> Tensors:  # noqa: ARG002 - protocol
        """`prompt_embeds` (text_tokens, 3 * dim): three layers side by side, and padding, which attends too."""
        embeds, _ = self.pipeline.encode_prompt(
            prompt, device=self.text_device, max_sequence_length=self.card.max_text_tokens
        )
        return {"prompt_embeds": embeds[0]}

    def _picture_mode(self, strength: float, *, whole: bool) -> str:  # noqa: ARG002 - protocol
        """The pipeline takes the mode of the posterior."""
        return MODE

    def _noise(self, image_latents: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Drawn by patches, (1, 4 * latent_channels, h / 2, w / 2)."""
        _, channels, height, width = image_latents.shape
        side = self.card.token_latents
        shape = (1, channels * side**2, height // side, width // side)
        drawn = randn_tensor(shape, generator=generator, device=self.device, dtype=self.dtype)
        return pixel_shuffle(drawn, side)

    def _condition(self, picture: torch.Tensor, holes: torch.Tensor, *, modes: bool) -> Condition:  # noqa: ARG002 - protocol
        """The mask is resized to tokens bilinearly, so a token may be edited in part."""
        multiple = self.card.pixel_multiple
        grid = [side // multiple for side in holes.shape[-2:]]
        mask = interpolate(holes, size=grid, mode="bilinear").to(self.device, self.dtype)
        channels = self.card.latent_channels * self.card.token_latents**2
        repeated = mask.view(-1, 1).expand(-1, channels)
        return lambda _generator: {"mask": repeated}


class KleinKVImages(KleinImages):
    """`Flux2KleinKVPipeline`: the same components, which encode and draw alike."""

    def prefix_tokens(self, text: Tensors, clean: int) -> int:  # noqa: ARG002 - protocol
        """The references: an edit's picture is one, too."""
        return clean


class Flux2Images(KleinImages):
    """`Flux2Pipeline`, which paints no mask: edits are prepared as `Flux2KleinInpaintPipeline` does."""

    kind = Flux2Pipeline
    left_out = ("transformer", "tokenizer")

    def __init__(self, folder: Path, *more: Any) -> None:
        super().__init__(folder, *more)
        # diffusers compares a tokenizer that it is given with Pixtral's own, which needs torchvision
        self.pipeline.tokenizer = PixtralTextProcessor.from_pretrained(
            str(folder / "tokenizer"), local_files_only=True
        )
