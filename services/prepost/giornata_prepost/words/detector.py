"""Zero-shot detectors of transformers: Grounding DINO, OWL-ViT, OWLv2. They find boxes; a refiner outlines them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Final

import torch
from transformers import AutoModelForZeroShotObjectDetection, AutoProcessor

from giornata.wire.masks import MaskCard
from giornata_prepost.images.pictures import Pixels
from giornata_prepost.images.regions import Candidate, Wanted, distinct
from giornata_prepost.words.segmenter import Refiner, checked

KINDS: Final = frozenset({"grounding-dino", "mm-grounding-dino", "owlvit", "owlv2"})
"""Their `model_type`; of transformers' zero-shot detectors, those whose processors take and tell the same."""


class Detector:
    """See :class:`giornata_prepost.words.segmenter.Segmenter`. Without a refiner, a region is its box."""

    def __init__(self, folder: Path, name: str, device: torch.device, refiner: Refiner | None = None) -> None:
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
    def seen(self, picture: Pixels, words: str, wanted: Wanted) -> tuple[Candidate, ...]:
        """The best candidates, one for each thing; those that are taken are outlined.

        Where none has the score that is wanted, the best one alone.
        """
        # a dot ends a phrase of Grounding DINO
        phrase = checked(
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
            Candidate(score, (box[0], box[1], box[2], box[3]))
            for score, box in zip(scores, boxes, strict=True)
        ]
        taken = distinct(every, wanted)
        if taken and self._refiner is not None:
            return self._refiner.outlined(picture, taken)
        return taken or tuple(sorted(every, key=lambda one: one.score, reverse=True)[:1])
