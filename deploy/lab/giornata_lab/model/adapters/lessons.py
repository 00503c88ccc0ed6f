"""The adapters that ship: looks of LoRAs, control images of the ControlNet `outline`, and the cards of all."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from scipy import ndimage

from giornata_lab.model.scenes import Scene, SceneTask, sample
from giornata_lab.model.scenes.scene import SPELLINGS, article
from giornata_lab.model.scenes.shapes import Mask, SceneShape, coverage
from giornata_lab.quality.cases import is_fit
from giornata_lab.quality.metrics import CHANGED, painted_thing
from giornata_tools.checkout import ADAPTERS

LINE_PX: Final = 2
"""Width of a drawn outline."""
LEAST_SILHOUETTE_PX: Final = {64: 36.0, 128: 48.0}
"""By side of the picture: a thing is at least half as wide as its mask."""
ENTROPY: Final = 0x4F55544C
"""First word of every held-out scene's seed; training's is a small number."""
HELD_OUT_SIDE: Final = 128


def silhouette(things: Sequence[SceneShape], side: int) -> Mask:
    """(side, side): the pixels that are covered by more than half."""
    found = np.zeros((side, side), bool)
    for thing in things:
        cover = coverage(thing, side)
        height, width = cover.alpha.shape
        found[cover.top : cover.top + height, cover.left : cover.left + width] |= cover.alpha > 0.5
    return found


def control_image(things: Sequence[SceneShape], side: int) -> NDArray[np.uint8]:
    """(side, side, 3): white outlines of `things` on black."""
    canvas = np.zeros((side, side), np.uint8)
    for thing in things:
        whole = silhouette([thing], side)
        canvas[whole & ~ndimage.binary_erosion(whole, iterations=LINE_PX, border_value=1)] = 255
    return np.repeat(canvas[..., None], 3, axis=2)


def sample_free(rng: np.random.Generator, side: int) -> Scene:
    """A random scene whose mask tells nothing of its thing's place, size and turn."""
    return sample(rng, side, SceneTask.ADD, LEAST_SILHOUETTE_PX[side], clear=True, free=True)


def held_out(limit: int) -> list[Scene]:
    """The first `limit` of the scenes to measure with: always the same, and training has not seen them."""
    return [_fit(number) for number in range(limit)]


def _fit(number: int) -> Scene:
    drawn = (
        sample_free(np.random.default_rng((ENTROPY, number, attempt)), HELD_OUT_SIDE) for attempt in count()
    )
    return next(scene for scene in drawn if is_fit(scene))


def overlap(edit: NDArray[np.uint8], scene: Scene) -> float:
    """Intersection over union of the thing that `edit` (side, side, 3) has painted with the asked one's silhouette."""
    return _over_union(painted_thing(edit, scene.before, scene.mask), scene)


def changed_overlap(edit: NDArray[np.uint8], scene: Scene) -> float:
    """As `overlap`, of all pixels of the mask that differ from the picture before by more than `CHANGED`."""
    return _over_union(changed(edit, scene), scene)


def changed(edit: NDArray[np.uint8], scene: Scene) -> Mask:
    """(side, side): the pixels of the mask that `edit` has changed by more than `CHANGED`."""
    away = np.linalg.norm((edit.astype(np.float32) - scene.before) / 255, axis=2)
    found: Mask = scene.mask & (away > CHANGED)
    return found


def _over_union(painted: Mask, scene: Scene) -> float:
    asked = silhouette(scene.asked, len(painted))
    return float((painted & asked).sum() / (painted | asked).sum())


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


FOLDER: Final = ADAPTERS
"""Where the adapters of fresco ship."""
LORAS: Final = FOLDER / "loras" / "fresco"
"""`loras` is a shared folder of the LoRA store: `<model>/<name>.safetensors`."""
CONTROLNETS: Final = FOLDER / "controlnets"
WEIGHTS: Final = "diffusion_pytorch_model.safetensors"
"""diffusers' name for a network's weights."""


class AdapterKind(StrEnum):
    """What an adapter is."""

    LORA = "lora"
    CONTROLNET = "controlnet"


class AdapterCard(BaseModel):
    """How one adapter came to be, and what it does."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    kind: AdapterKind
    does: str
    base_digest: str
    """12 hex digits of the sha-256 over the weights of transformer and text encoders that it was trained for."""
    command: str
    seed: int
    steps: int
    sha256: str
    """sha-256 of the weights' file."""
    size_bytes: int
    """Size of the weights' file."""
    measured: dict[str, float] = {}
    """Figures of held-out edits; `python -m giornata_lab.model.adapters` writes them."""

    @property
    def file(self) -> Path:
        """The weights, where they ship."""
        if self.kind is AdapterKind.LORA:
            return LORAS / f"{self.name}.safetensors"
        return CONTROLNETS / self.name / WEIGHTS

    def write(self, folder: Path = FOLDER) -> None:
        """Put the card where `read_card` finds it."""
        path = card_path(self.name, folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")


def card_path(name: str, folder: Path = FOLDER) -> Path:
    """The file of a card."""
    return folder / "cards" / f"{name}.json"


def read_card(name: str, folder: Path = FOLDER) -> AdapterCard:
    """The card of the adapter `name`."""
    return AdapterCard.model_validate_json(card_path(name, folder).read_bytes())


def sha256_of(path: Path) -> str:
    """64 hex digits over a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
