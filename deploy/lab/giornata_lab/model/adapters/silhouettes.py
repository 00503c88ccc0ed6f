"""Control images of the ControlNet `outline`, its scenes, and how well a picture keeps to an outline. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from giornata_lab.model.scenes import Scene, SceneTask, sample
from giornata_lab.model.scenes.masks import Mask
from giornata_lab.model.scenes.outlines import SceneShape, coverage
from giornata_lab.quality.cases import is_fit
from giornata_lab.quality.checker import CHANGED, painted_thing

LINE_PX: Final = 2
"""Width of a drawn outline."""
LEAST_MASK_PX: Final = {64: 36.0, 128: 48.0}
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
    return sample(rng, side, SceneTask.ADD, LEAST_MASK_PX[side], clear=True, free=True)


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
    away = np.linalg.norm((edit.astype(np.float32) - scene.before) / 255, axis=2)
    return _over_union(scene.mask & (away > CHANGED), scene)


def _over_union(painted: Mask, scene: Scene) -> float:
    asked = silhouette(scene.asked, len(painted))
    return float((painted & asked).sum() / (painted | asked).sum())
