"""Opening autoencoder and text encoders of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from giornata.checkpoints import checkpoint_folder
from giornata.families import Family, read_model_card
from giornata.wire.errors import Failed
from giornata.wire.models import ModelCard
from giornata_prepost.config import PrepostConfig
from giornata_prepost.families.flux.images import FillImages, InpaintImages
from giornata_prepost.families.protocol import ImageModel

FAMILIES: Final[dict[str, Callable[[Path, ModelCard, torch.device, torch.dtype], ImageModel]]] = {
    Family.FLUX_INPAINT: InpaintImages,
    Family.FLUX_FILL: FillImages,
}
"""Loads a folder to a device, with weights and results of a dtype, by :attr:`ModelCard.family`."""


def open_model(config: PrepostConfig) -> ImageModel:
    """Load autoencoder and text encoders of the configured checkpoint; a hub id is downloaded first.

    Raises:
        Failed: there is no such checkpoint, or its family is not served.
    """
    try:
        folder = checkpoint_folder(config.model)
        card = read_model_card(folder, config.served_name)
        return FAMILIES[card.family](folder, card, config.torch_device(), config.torch_dtype())
    except (ValueError, OSError) as error:
        raise Failed(f"The model {config.model} cannot be loaded: {error}") from error
