"""VAE and prompt encoding and VAE decoding of Flux.2."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import Flux2Pipeline

from giornata.wire.models import ModelCard
from giornata_prepost.families.flux2.processor import PixtralTextProcessor
from giornata_prepost.families.flux2_klein.images import KleinImages


class Flux2Images(KleinImages):
    """`Flux2Pipeline`, which paints no mask: edits are prepared as `Flux2KleinInpaintPipeline` does."""

    kind = Flux2Pipeline
    left_out = ("transformer", "tokenizer")

    def __init__(self, folder: Path, card: ModelCard, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(folder, card, device, dtype)
        # diffusers compares a component that it is given with its class, which needs torchvision
        self.pipeline.tokenizer = PixtralTextProcessor.of(folder / "tokenizer")
