"""The same edit by diffusers' own pipeline in this process: what the system's picture is compared with."""

from __future__ import annotations

from dataclasses import dataclass
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
from giornata_prepost.images.masks import Alpha, model_mask
from giornata_prepost.images.paste import paste, resize
from giornata_prepost.images.pictures import Pixels
from giornata_prepost.images.stages import visible

PIPELINES: Final[dict[str, type[Any]]] = {
    Family.FLUX_FILL: FluxFillPipeline,
    Family.FLUX_INPAINT: FluxInpaintPipeline,
}


@dataclass(frozen=True)
class OracleSetting:
    """What all edits share; everything else is the request's or the model's default."""

    budget_pixels: int
    """Most pixels that the model computes."""
    torch_threads: int
    """The services' number: another one rounds differently, by up to one 8-bit step."""


class Oracle:
    """The checkpoint's pipeline in float32 on the CPU."""

    def __init__(self, source: str, setting: OracleSetting) -> None:
        """Load `source`, a folder or a hub id whose files the services have fetched already."""
        set_num_threads(setting.torch_threads)
        folder = checkpoint_folder(source)
        self._setting = setting
        self._card = read_model_card(folder)
        self._pipeline = PIPELINES[self._card.family].from_pretrained(folder, dtype=float32)
        self._pipeline.set_progress_bar_config(disable=True)

    @property
    def name(self) -> str:
        """The name of the pipeline's class."""
        return type(self._pipeline).__name__

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
        crop, size = visible(alpha, parameters.padding_mask_crop, card, self._setting.budget_pixels)
        window = (crop or Box(0, 0, *Size.of(alpha))).window
        mask = model_mask(alpha[window], size, card.mask_grain)
        painted = self._pipeline(
            prompt=parameters.prompt,
            image=Image.fromarray(resize(original[window], size)),
            mask_image=Image.fromarray(np.where(mask, np.uint8(255), np.uint8(0))),
            width=size.width,
            height=size.height,
            num_inference_steps=parameters.num_inference_steps,
            max_sequence_length=card.max_text_tokens,
            generator=Generator("cpu").manual_seed(parameters.seed or 0),
            output_type="pil",
            **_family_arguments(card),
        ).images[0]
        return paste(original, alpha, np.asarray(painted), crop=crop)


def _family_arguments(card: ModelCard) -> dict[str, float]:
    arguments = {"guidance_scale": card.default_guidance_scale} if card.takes_guidance else {}
    return arguments if card.family == Family.FLUX_FILL else {**arguments, "strength": card.default_strength}
