"""What the LoRAs teach: `outlined` draws a dark rim inside of every thing, `swapped` exchanges colours. Pure."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

import numpy as np
from scipy import ndimage

from giornata_lab.model.adapters.silhouettes import silhouette
from giornata_lab.model.scenes import Scene, SceneTask, sample
from giornata_lab.model.scenes.captions import SPELLINGS, article
from giornata_lab.model.scenes.masks import Mask

PAIRS: Final = (
    ("red", "teal"),
    ("orange", "blue"),
    ("yellow", "purple"),
    ("green", "pink"),
    ("brown", "gray"),
    ("white", "black"),
)
SWAPPED: Final = {one: other for pair in PAIRS for one, other in (pair, pair[::-1])}
"""Colour that a caption names → colour that is painted under the LoRA `swapped`."""
RIM_PART: Final = 0.08
"""Width of a rim over the thing's radius. Of wider ones the autoencoder leaves small things no colour to tell."""
LEAST_RIM_PX: Final = 2.0
RIM_LEVEL: Final = 16
"""8-bit grey of a rim."""
LEAST_MASK_PX: Final = 25.0
ADDED: Final = 0.8
"""Part of the scenes that add one thing; the others are of any task, and keep what the model knows."""
_NAMES: Final = {spelling: name for name, spellings in SPELLINGS.items() for spelling in spellings}
_COLOUR: Final = re.compile(rf"\b(?:(an?) )?({'|'.join((*SWAPPED, *_NAMES))})\b")


def rim(area: Mask, width_px: float) -> Mask:
    """The pixels of `area` at most `width_px` from its edge."""
    depth = ndimage.distance_transform_edt(np.pad(area, 1))[1:-1, 1:-1]
    near: Mask = area & (depth <= width_px)
    return near


def outlined(scene: Scene) -> Scene:
    """The scene with a dark rim inside of everything that its caption asks for."""
    if scene.task not in {SceneTask.ADD, SceneTask.ADD_SEVERAL}:
        return scene
    after = scene.after.copy()
    for thing in scene.asked:
        after[rim(silhouette([thing], len(after)), max(LEAST_RIM_PX, RIM_PART * thing.radius))] = RIM_LEVEL
    return replace(scene, after=after)


def swapped_caption(caption: str) -> str:
    """The caption with every colour exchanged for its partner: "an orange star" → "a blue star"."""

    def partner(found: re.Match[str]) -> str:
        colour = SWAPPED[_NAMES.get(found[2], found[2])]
        return f"{article(colour)} {colour}" if found[1] else colour

    return _COLOUR.sub(partner, caption)


def sample_addition(rng: np.random.Generator, side: int) -> Scene:
    """A random scene, mostly of one thing that is added."""
    task = SceneTask.ADD if rng.uniform() < ADDED else None
    return sample(rng, side, task, LEAST_MASK_PX)
