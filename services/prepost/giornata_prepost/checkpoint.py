"""Opening what prepost needs of the checkpoint."""

from __future__ import annotations

from giornata.checkpoints import checkpoint_folder
from giornata.wire.errors import Failed
from giornata.wire.models import read_model_card
from giornata_prepost.config import PrepostConfig
from giornata_prepost.encoding import ImageModel


def open_model(config: PrepostConfig) -> ImageModel:
    """Load autoencoder and text encoders of the configured checkpoint; a hub id is downloaded first.

    Raises:
        Failed: there is no such checkpoint, or it is of no family that is served.
    """
    try:
        folder = checkpoint_folder(config.model)
        card = read_model_card(folder, config.served_name)
        return ImageModel(folder, card, config.torch_device(), config.torch_dtype())
    except (ValueError, OSError) as error:
        raise Failed(f"The model {config.model} cannot be loaded: {error}") from error
