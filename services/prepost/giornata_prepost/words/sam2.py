"""SAM 2 (Ravi et al., 2024) as a refiner: the outline of what is in a box, by transformers' `Sam2Model`.

Its image processor needs torchvision, which has no build beside torch's for CPUs here. What it does is resizing to a
square and normalising, which this module does itself; a test holds it to the published formula.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import torch
from PIL import Image
from transformers import Sam2Model
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from giornata_prepost.images.pictures import Pixels
from giornata_prepost.images.regions import Candidate

KINDS: Final = frozenset({"sam2", "sam2_video"})
"""Its `model_type`: published checkpoints name the one for videos, whose weights `Sam2Model` reads too."""


class Sam2:
    """See :class:`giornata_prepost.words.segmenter.Refiner`."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        network = Sam2Model.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype=torch.float32
        )
        self._network, self._device = network.to(device).eval(), device
        self._side: int = network.config.prompt_encoder_config.image_size

    @torch.no_grad()
    def outlined(self, picture: Pixels, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
        """The candidates with the heat of their outlines, of the network's own size: (256, 256)."""
        boxes = torch.tensor([one.box for one in candidates], device=self._device).clamp(0, 1) * self._side
        told = self._network(
            pixel_values=self.pixel_values(picture), input_boxes=boxes[None].float(), multimask_output=False
        )
        heats = torch.sigmoid(told.pred_masks[0, :, 0]).float().cpu().numpy()
        return tuple(
            one._replace(heat=np.ascontiguousarray(heat)) for one, heat in zip(candidates, heats, strict=True)
        )

    def pixel_values(self, picture: Pixels) -> torch.Tensor:
        """What the network sees of a picture: (1, 3, side, side)."""
        square = Image.fromarray(picture).resize((self._side, self._side), Image.Resampling.BILINEAR)
        shares = np.asarray(square, np.float32) / np.float32(255)
        normal = (shares - np.array(IMAGENET_DEFAULT_MEAN, np.float32)) / np.array(
            IMAGENET_DEFAULT_STD, np.float32
        )
        return torch.from_numpy(normal.transpose(2, 0, 1)[None].copy()).to(self._device)
