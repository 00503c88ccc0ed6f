"""How well a segmenter finds what phrases mean, in scenes that training has not seen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import nn
from transformers import AutoProcessor, CLIPSegForImageSegmentation, CLIPSegProcessor

from giornata_lab.model.scenes.shapes import Mask, overlap
from giornata_lab.model.segmenter import scenes
from giornata_lab.model.segmenter.scenes import HELD_OUT, NAMING, NamedScene, Phrase, PhraseKind, held_out
from giornata_tools.checkout import SEGMENTER

CARD: Final = "card.json"
WEIGHTS: Final = "model.safetensors"
"""transformers' name for a model's weights."""


class SegmenterCard(BaseModel):
    """How the segmenter came to be, and how well it finds what it is asked for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    command: str
    seed: int
    steps: int
    sha256: str
    """sha-256 of the weights' file."""
    size_bytes: int
    """Size of the weights' file."""
    measured: dict[int, dict[str, float]] = {}
    """Side of the pictures in pixels → figures of held-out scenes; `python -m giornata_lab.model.segmenter` writes
    them."""

    def write(self, folder: Path = SEGMENTER) -> None:
        """Put the card where `read` finds it."""
        (folder / CARD).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_card(folder: Path = SEGMENTER) -> SegmenterCard:
    """The card of the segmenter in `folder`."""
    return SegmenterCard.model_validate_json((folder / CARD).read_bytes())


Figures = dict[str, float]
LIKELY: Final = 0.5
"""Chance from which a pixel is meant, as prepost's default for a CLIPSeg."""
NOTHING: Final = 0.001
"""A mask of a smaller part of the picture finds nothing."""


@dataclass(frozen=True)
class ReferenceSegmenter:
    """A checkpoint as transformers loads it, in float32."""

    model: CLIPSegForImageSegmentation
    processor: CLIPSegProcessor

    @classmethod
    def load(cls, folder: Path) -> ReferenceSegmenter:
        """The checkpoint in `folder`."""
        model = CLIPSegForImageSegmentation.from_pretrained(folder, dtype=torch.float32).eval()
        return cls(model, AutoProcessor.from_pretrained(folder))

    @torch.inference_mode()
    def masks(self, picture: np.ndarray, texts: Sequence[str]) -> list[Mask]:
        """Return what each of `texts` means in `picture`, (height, width, 3) uint8; masks are (height, width)."""
        read = self.processor(text=list(texts), images=[picture], padding=True, return_tensors="pt")
        pixels = read.pixel_values.expand(len(texts), -1, -1, -1)
        logits = self.model(input_ids=read.input_ids, pixel_values=pixels).logits
        heat = logits.view(len(texts), 1, *pixels.shape[2:]).sigmoid()
        scaled = nn.functional.interpolate(heat, picture.shape[:2], mode="bilinear")
        return [mask.numpy() for mask in scaled[:, 0] >= LIKELY]


def asked(scene: NamedScene, index: int) -> list[Phrase]:
    """A phrase of every kind, and one that names nothing, for the held-out scene `index`; equal at every call."""
    rng = np.random.default_rng((HELD_OUT, len(scene.picture), index, 1))
    there = [scenes.draw(rng, scene, kind) for kind in PhraseKind]
    return [*there, scenes.draw(rng, scene, NAMING[index % len(NAMING)], absent=True)]


def judge(segmenter: ReferenceSegmenter, side: int, count: int) -> Figures:
    """Mean overlaps with the truth over `count` held-out scenes of `side` pixels.

    `overlap` is over all phrases that mean something, `tenth` what a tenth of them stay below, those of `PhraseKind`
    are over phrases of that kind; `absent` is the part of the phrases that mean nothing for which nothing is found.
    """
    found: defaultdict[str, list[float]] = defaultdict(list)
    for index, scene in enumerate(held_out(side, count)):
        every = asked(scene, index)
        for phrase, mask in zip(every, segmenter.masks(scene.picture, [p.text for p in every]), strict=True):
            truth = scenes.mask_of(scene, phrase)
            if truth.any():
                found[phrase.kind].append(overlap(mask, truth))
            else:
                found["absent"].append(float(mask.mean() < NOTHING))
    overlaps = [value for kind in PhraseKind for value in found[kind]]
    return {
        "overlap": _rounded(overlaps),
        "tenth": round(float(np.quantile(overlaps, 0.1)), 4),
        **{name: _rounded(found[name]) for name in (*PhraseKind, "absent")},
    }


def _rounded(values: Iterable[float]) -> float:
    return round(float(np.mean(list(values))), 4)
