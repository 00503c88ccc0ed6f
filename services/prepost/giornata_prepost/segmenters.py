"""Segmenters of transformers that find things by words: CLIPSeg, zero-shot detectors, SAM 2; and their loading."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForZeroShotObjectDetection,
    AutoProcessor,
    CLIPSegForImageSegmentation,
    Sam2Model,
)
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from giornata.checkpoints import checkpoint_folder
from giornata.wire.errors import Failed, InvalidField
from giornata.wire.messages import MaskCard
from giornata_prepost.config import PrepostConfig
from giornata_prepost.images.pictures import Pixels
from giornata_prepost.segmentation import Detection, HeatMap, RegionCriteria, Segmenter, suppress_overlaps

UNNAMED: Final = 1 << 20
"""A tokenizer's `model_max_length` above this says that its checkpoint names none."""


def check_words(words: str, tokenizer: Any, positions: int) -> str:
    """`words` if they have no more tokens than the model has `positions` for; InvalidField otherwise."""
    named: int = tokenizer.model_max_length
    most = min(positions, named) if named < UNNAMED else positions
    count = len(tokenizer(words).input_ids)
    if count > most:
        raise InvalidField(
            "The words are too long for the segmenter.",
            field="mask_prompt",
            received=f"{count} tokens",
            accepted=f"at most {most}",
        )
    return words


CLIPSEG: Final = "clipseg"
"""`model_type` of CLIPSeg."""
THRESHOLD: Final = 0.5
"""More likely than not: it is trained by the cross-entropy of each pixel."""


class ClipSeg:
    """CLIPSeg (Lüddecke and Ecker, CVPR 2022), by transformers: a heat map of everything that words name.

    A :class:`Segmenter`. Float32 everywhere: it is small.
    """

    def __init__(self, folder: Path, name: str, device: torch.device) -> None:
        self.card = MaskCard(name=name, threshold=THRESHOLD)
        self._processor = AutoProcessor.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        network = CLIPSegForImageSegmentation.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype=torch.float32
        )
        self._network, self._device = network.to(device).eval(), device

    @torch.no_grad()
    def seen(self, picture: Pixels, words: str, wanted: RegionCriteria) -> HeatMap:  # noqa: ARG002 - the map has all of them
        """The map, of the network's own size: (352, 352) of published ones."""
        text = self._network.config.text_config
        words = check_words(words, self._processor.tokenizer, text.max_position_embeddings)
        inputs = self._processor(text=[words], images=[picture], return_tensors="pt").to(self._device)
        logits = self._network(**inputs).logits
        heat = torch.sigmoid(logits.reshape(logits.shape[-2:])).float().cpu().numpy()
        return HeatMap(np.ascontiguousarray(heat))


REFINERS: Final = frozenset({"sam2", "sam2_video"})
"""`model_type` of SAM 2: published checkpoints name the one for videos, whose weights `Sam2Model` reads too."""


class Sam2:
    """SAM 2 (Ravi et al., 2024), by transformers: the outline of what is in a box, which refines a detector.

    Its image processor needs torchvision, which has no build beside torch's for CPUs here. What it does is resizing to
    a square and normalising, which this class does itself; a test holds it to the published formula.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        network = Sam2Model.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype=torch.float32
        )
        self._network, self._device = network.to(device).eval(), device
        self._side: int = network.config.prompt_encoder_config.image_size

    @torch.no_grad()
    def outlined(self, picture: Pixels, candidates: tuple[Detection, ...]) -> tuple[Detection, ...]:
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
        """Return what the network sees of a picture: (1, 3, side, side)."""
        square = Image.fromarray(picture).resize((self._side, self._side), Image.Resampling.BILINEAR)
        shares = np.asarray(square, np.float32) / np.float32(255)
        normal = (shares - np.array(IMAGENET_DEFAULT_MEAN, np.float32)) / np.array(
            IMAGENET_DEFAULT_STD, np.float32
        )
        return torch.from_numpy(normal.transpose(2, 0, 1)[None].copy()).to(self._device)


DETECTORS: Final = frozenset({"grounding-dino", "mm-grounding-dino", "owlvit", "owlv2"})
"""`model_type` of detectors; of transformers' zero-shot detectors, those whose processors take and tell the same."""


class Detector:
    """Zero-shot detectors of transformers: Grounding DINO, OWL-ViT, OWLv2. They find boxes; a refiner outlines them.

    A :class:`Segmenter`. Without a refiner, a region is its box.
    """

    def __init__(self, folder: Path, name: str, device: torch.device, refiner: Sam2 | None = None) -> None:
        self._processor = AutoProcessor.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        self._found = self._processor.post_process_grounded_object_detection
        own = inspect.signature(self._found).parameters["threshold"].default
        self.card = MaskCard(name=name, threshold=own)
        network = AutoModelForZeroShotObjectDetection.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype=torch.float32
        )
        self._network, self._device, self._refiner = network.to(device).eval(), device, refiner

    @torch.no_grad()
    def seen(self, picture: Pixels, words: str, wanted: RegionCriteria) -> tuple[Detection, ...]:
        """The best candidates, one for each thing; those that are taken are outlined.

        Where none has the score that is wanted, the best one alone.
        """
        # a dot ends a phrase of Grounding DINO
        phrase = check_words(
            words.replace(".", " "),
            self._processor.tokenizer,
            self._network.config.text_config.max_position_embeddings,
        )
        inputs = self._processor(text=[[phrase]], images=[picture], return_tensors="pt").to(self._device)
        height, width, _ = picture.shape
        (told,) = self._found(self._network(**inputs), threshold=0.0, target_sizes=[(height, width)])
        sides = torch.tensor([width, height, width, height], device=told["boxes"].device)
        boxes = (told["boxes"] / sides).cpu().tolist()
        scores = told["scores"].cpu().tolist()
        every = [
            Detection(score, (box[0], box[1], box[2], box[3]))
            for score, box in zip(scores, boxes, strict=True)
        ]
        taken = suppress_overlaps(every, wanted)
        if taken and self._refiner is not None:
            return self._refiner.outlined(picture, taken)
        return taken or tuple(sorted(every, key=lambda one: one.score, reverse=True)[:1])


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
        if kind == CLIPSEG and config.mask_refiner is None:
            return ClipSeg(folder, name, device)
        if kind in DETECTORS:
            return Detector(folder, name, device, _refiner(config, device))
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        raise Failed(f"The mask model {config.mask_model} cannot be loaded: {error}") from error
    if kind == CLIPSEG:
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
    if kind not in REFINERS:
        raise ValueError(f"the refiner {config.mask_refiner} is of the kind {kind}, and SAM 2 is accepted")
    return Sam2(folder, device)


def _kind(folder: Path) -> str:
    """Return what a checkpoint says it is; ValueError or OSError where its configuration is not to be read."""
    kind: str = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).model_type
    return kind
