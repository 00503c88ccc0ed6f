"""The same edit by diffusers' own pipeline in this process: what the system's picture is compared with."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from diffusers import FluxFillPipeline, FluxInpaintPipeline
from PIL import Image
from torch import Generator, float32, set_num_threads

from giornata.checkpoints import checkpoint_folder
from giornata.families import Family, read_model_card
from giornata.wire.models import ModelCard
from giornata.wire.requests import EditParameters
from giornata_prepost.images.geometry import Box, Size
from giornata_prepost.images.inspection import computed_size, cut_out, template
from giornata_prepost.images.masks import Alpha, model_mask
from giornata_prepost.images.paste import paste
from giornata_prepost.images.pictures import DecodedPicture, Pixels

PIPELINES: Final[dict[str, type[Any]]] = {
    Family.FLUX_FILL: FluxFillPipeline,
    Family.FLUX_INPAINT: FluxInpaintPipeline,
}


def call_defaults(card: ModelCard) -> dict[str, Any]:
    """What calls of a model's pipeline say unless a request does."""
    guided = {"guidance_scale": card.default_guidance_scale} if card.takes_guidance else {}
    return {
        "num_inference_steps": card.default_steps,
        "strength": card.default_strength,
        "max_sequence_length": card.max_text_tokens,
        **guided,
    }


class Oracle:
    """The checkpoint's pipeline in float32 on the CPU."""

    def __init__(self, source: str, budget_pixels: int, torch_threads: int) -> None:
        """Load `source`, a folder or a hub id whose files the services have fetched already.

        Args:
            source: of the checkpoint.
            budget_pixels: most pixels that the model computes.
            torch_threads: the services' number; another one rounds differently, by up to one 8-bit step.
        """
        set_num_threads(torch_threads)
        folder = checkpoint_folder(source)
        self._budget_pixels = budget_pixels
        self._card = read_model_card(folder)
        self._pipeline = PIPELINES[self._card.family].from_pretrained(folder, dtype=float32)
        self._pipeline.set_progress_bar_config(disable=True)
        self.name: Final = type(self._pipeline).__name__

    def edit(self, original: Pixels, alpha: Alpha, parameters: EditParameters) -> Pixels:
        """Edit the picture, and paste as the system pastes.

        Args:
            original: (height, width, 3) uint8.
            alpha: (height, width) float32, the effective alpha.
            parameters: with seed and steps; those of the crop are read, and what diffusers is told.

        Returns:
            (height, width, 3) uint8.
        """
        card = self._card
        whole = Size(original.shape[1], original.shape[0])
        crop = cut_out(alpha, parameters.padding_mask_crop)
        size = computed_size(whole, crop, card, self._budget_pixels)
        window = (crop or Box(0, 0, *whole)).window
        mask = model_mask(alpha[window], size, card.mask_grain)
        painted = self._pipeline(
            prompt=parameters.prompt,
            image=Image.fromarray(template(DecodedPicture(original[window]), size)),
            mask_image=Image.fromarray(np.where(mask, np.uint8(255), np.uint8(0))),
            width=size.width,
            height=size.height,
            generator=Generator("cpu").manual_seed(parameters.seed or 0),
            output_type="pil",
            **{**call_defaults(card), "num_inference_steps": parameters.num_inference_steps},
        ).images[0]
        return paste(original, alpha, np.asarray(painted), crop=crop)
