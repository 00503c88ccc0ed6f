"""A small classifier of what lies in a mask; its features feed the Fréchet distance. It decides no gate.

Trained by ``python -m giornata_tools.quality.train_classifier`` on scenes of its own; its weights lie here.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from giornata_tools.model.scenes import COLOURS, SHAPES
from giornata_tools.model.scenes.masks import Mask
from giornata_tools.quality.metrics import Features, Pixels

WEIGHTS: Final = Path(__file__).with_name("classifier.safetensors")
CROP: Final = 48
"""Side of what the classifier sees, in pixels."""
SURROUND: Final = 0.15
"""Share of the mask's box that is added on every side."""
PLACES: Final = 3
"""Parts of each axis over which means are taken."""
FEATURES: Final = 32
CLASSES: Final = (len(COLOURS) + 1, len(SHAPES) + 1)
"""Colours and shapes; the last of each is none."""
BATCH: Final = 128


class Classifier(nn.Module):
    """Four convolutions, a mean over places, `FEATURES` numbers, and from those a colour and a shape."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 32, 48, 64)
        self.trunk = nn.Sequential(
            *(
                layer
                for i, (one, next_) in enumerate(pairwise(widths))
                for layer in (nn.Conv2d(one, next_, 3, 2 if i else 1, 1), nn.GroupNorm(8, next_), nn.SiLU())
            )
        )
        self.features = nn.Linear(widths[-1] * PLACES**2, FEATURES)
        self.heads = nn.ModuleList(nn.Linear(FEATURES, n) for n in CLASSES)

    def embed(self, crops: torch.Tensor) -> torch.Tensor:
        """(n, FEATURES) of crops (n, 3, CROP, CROP) in [-1, 1]."""
        places = nn.functional.avg_pool2d(self.trunk(crops), CROP // 8 // PLACES)
        embedded: torch.Tensor = self.features(places.flatten(1))
        return embedded

    def forward(self, crops: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of colour and shape, (n, classes) each."""
        embedded = nn.functional.silu(self.embed(crops))
        colour, shape = (head(embedded) for head in self.heads)
        return colour, shape


def load(weights: Path = WEIGHTS) -> Classifier:
    """The trained classifier, on the CPU, float32."""
    classifier = Classifier()
    classifier.load_state_dict(load_file(weights))
    return classifier.eval()


def crop(picture: Pixels, mask: Mask) -> Pixels:
    """(CROP, CROP, 3): the mask's box with some of its surroundings, cut off at the picture's edge."""
    spans = []
    for axis in (0, 1):
        inside = np.flatnonzero(mask.any(1 - axis))
        first, last = int(inside[0]), int(inside[-1]) + 1
        more = round(SURROUND * (last - first))
        spans.append((max(first - more, 0), min(last + more, mask.shape[axis])))
    (top, bottom), (left, right) = spans
    seen = Image.fromarray(picture).resize((CROP, CROP), Image.Resampling.BOX, (left, top, right, bottom))
    return np.asarray(seen)


def embed(classifier: Classifier, pictures: Iterable[tuple[Pixels, Mask]]) -> Features:
    """(pictures, FEATURES) float64 of what lies in the masks."""
    crops = np.stack([crop(picture, mask) for picture, mask in pictures])
    with torch.inference_mode():
        parts = [classifier.embed(to_tensor(crops[i : i + BATCH])) for i in range(0, len(crops), BATCH)]
        return torch.cat(parts).double().numpy()


def to_tensor(crops: NDArray[np.uint8]) -> torch.Tensor:
    """(n, CROP, CROP, 3) uint8 as (n, 3, CROP, CROP) float32 in [-1, 1]."""
    return torch.from_numpy(crops).permute(0, 3, 1, 2).float() / 127.5 - 1
