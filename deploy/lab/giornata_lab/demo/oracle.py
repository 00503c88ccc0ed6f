"""The same edit by diffusers' own pipeline in this process: what the system's picture is compared with."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from PIL import Image

from giornata.checkpoints import checkpoint_folder
from giornata.model_cards import read_model_card
from giornata.wire.requests import EditParameters
from giornata_lab.baseline.pipeline import Pipeline, PipelineCallSettings, PipelineRow
from giornata_prepost.images.geometry import Box, Size
from giornata_prepost.images.masks import Alpha, model_mask
from giornata_prepost.images.paste import paste, resize
from giornata_prepost.images.pictures import Pixels
from giornata_prepost.images.stages import visible


class Oracle:
    """The checkpoint's pipeline in float32 on the CPU."""

    def __init__(self, source: str, budget_pixels: int, torch_threads: int) -> None:
        """Load `source`, a folder or a hub id whose files the services have fetched already.

        `torch_threads` is the services' number: another one rounds differently, by up to one 8-bit step.
        """
        torch.set_num_threads(torch_threads)
        self._budget_pixels = budget_pixels
        self._card = read_model_card(checkpoint_folder(source))
        self._pipeline = Pipeline(source, torch.device("cpu"), torch.float32)
        self.name: Final = self._pipeline.kind

    def edit(self, original: Pixels, alpha: Alpha, parameters: EditParameters) -> Pixels:
        """Edit `original`, (height, width, 3) uint8, and paste as the system pastes.

        Args:
            original: the picture.
            alpha: (height, width) float32, the effective alpha.
            parameters: with seed and steps; those of the crop are read, and what diffusers is told.
        """
        crop, size = visible(alpha, parameters.padding_mask_crop, self._card, self._budget_pixels)
        window = (crop or Box(0, 0, *Size.of(alpha))).window
        mask = model_mask(alpha[window], size, self._card.mask_grain)
        row = PipelineRow(
            prompt=parameters.prompt,
            image=Image.fromarray(resize(original[window], size)),
            mask=Image.fromarray(np.where(mask, np.uint8(255), np.uint8(0))),
            seed=parameters.seed or 0,
        )
        alike = PipelineCallSettings(
            *size, parameters.num_inference_steps, guidance_scale=None, strength=None
        )
        [painted] = self._pipeline.paint([row], alike)
        return paste(original, alpha, np.asarray(painted), crop=crop)
