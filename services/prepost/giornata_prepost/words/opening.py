"""Opening what makes masks from words, by what the checkpoint says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from transformers import AutoConfig

from giornata.checkpoints import checkpoint_folder
from giornata.wire.errors import Failed
from giornata_prepost.config import PrepostConfig
from giornata_prepost.words import clipseg, detector, sam2
from giornata_prepost.words.clipseg import ClipSeg
from giornata_prepost.words.detector import Detector
from giornata_prepost.words.sam2 import Sam2
from giornata_prepost.words.segmenter import Segmenter

FILES: Final = ["*.json", "*.txt", "*.model", "model.safetensors", "model-*.safetensors"]
"""Files of a hub repository: nothing that is pickled, and no code."""
ACCEPTED: Final = "CLIPSeg, or a zero-shot detector: Grounding DINO, OWL-ViT, OWLv2"


def open_segmenter(config: PrepostConfig) -> Segmenter | None:
    """Load the configured segmenter, and its refiner; a hub id is downloaded first. None where none is configured.

    Raises:
        Failed: there is no such checkpoint, it is of another kind, or it has no safetensors.
    """
    if config.mask_model is None:
        return None
    name, device = Path(config.mask_model).name or config.mask_model, config.torch_device()
    try:
        folder = checkpoint_folder(config.mask_model, FILES)
        kind = _kind(folder)
        if kind == clipseg.KIND and config.mask_refiner is None:
            return ClipSeg(folder, name, device)
        if kind in detector.KINDS:
            return Detector(folder, name, device, _refiner(config, device))
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        raise Failed(f"The mask model {config.mask_model} cannot be loaded: {error}") from error
    if kind == clipseg.KIND:
        raise Failed(
            "CLIPSeg outlines what it finds itself, and takes no refiner.", received=config.mask_refiner
        )
    raise Failed(
        f"The mask model {config.mask_model} finds nothing by words.", received=kind, accepted=ACCEPTED
    )


def _refiner(config: PrepostConfig, device: torch.device) -> Sam2 | None:
    if config.mask_refiner is None:
        return None
    folder = checkpoint_folder(config.mask_refiner, FILES)
    kind = _kind(folder)
    if kind not in sam2.KINDS:
        raise ValueError(f"the refiner {config.mask_refiner} is of the kind {kind}, and SAM 2 is accepted")
    return Sam2(folder, device)


def _kind(folder: Path) -> str:
    """What a checkpoint says it is; ValueError or OSError where its configuration is not to be read."""
    kind: str = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).model_type
    return kind
