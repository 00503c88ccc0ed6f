"""What is measured of each edit: what was painted, by a checker without any learned model, and how near pictures are.

The ground below the mask is known, so the painted thing is what is closer to its own colour than to the ground. Its
colour is the palette's nearest to its pixels' median; its shape is the outline that overlaps it best, both brought to
the same centre and area, over small turns, shifts and sizes. Pure. Pictures are (height, width, 3) uint8 unless said
otherwise; masks (height, width) bool.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from giornata_lab.model.scenes import COLOURS, SHAPES, SceneTask
from giornata_lab.model.scenes.shapes import Mask, SceneShape, coverage, rgb
from giornata_lab.quality.cases import QualityCase
from giornata_prepost.images.masks import effective_alpha
from giornata_tools.lora_profiler.profiler import ssim

CHANGED: Final = 0.12
"""Euclidean distance from the ground, in [0, 1] RGB, from which a pixel counts as changed."""
LEAST_PART: Final = 0.06
"""Share of the mask's area: a smaller thing is none."""
LEAST_OVERLAP: Final = 0.72
"""Intersection over union with the best outline: below, the shape is none of the eight."""
COLOUR_REACH: Final = 0.30
"""Farthest that a thing's median may lie from the palette's nearest colour and still be called by its name."""
EVENNESS: Final = 0.13
"""Farthest that three quarters of a thing's pixels may lie from its colour: noise has a median, too, but no colour."""
SECOND_PART: Final = 0.3
"""A second thing of this part of the first one's area is one too many."""
FLOODED_PART: Final = 0.85
"""Share of the mask's area: a larger thing shows the mask's shape and none of its own. True renders reach 0.63."""
SPECK_PART: Final = 0.06
"""Holes below this part of the thing's area are noise; a ring's hole is 43 % of it."""
SHADES: Final = (0.85, 1.0, 1.15)
"""How a colour may be shaded from bottom to top."""
FRAME: Final = 48
"""Side of the square in which outlines are compared, in pixels."""
FRAME_AREA: Final = 0.30
"""Side of the frame: every component and outline is brought to this area before they are compared."""
TURNS_DEG: Final = tuple(range(-16, 17, 4))
SIZES: Final = (0.92, 1.0, 1.08)
SHIFTS_PX: Final = (-1.5, 0.0, 1.5)


@dataclass(frozen=True)
class DetectedShape:
    """What the checker sees in the mask; None where it is nothing it has a name for."""

    colour: str | None
    shape: str | None
    area_px: int
    """Area of the thing; 0 where nothing was painted."""
    overlap: float
    """Intersection over union with the best outline, 0 to 1."""

    def is_a(self, colour: str, shape: str) -> bool:
        """Return whether both are as asked for."""
        return (self.colour, self.shape) == (colour, shape)


NOTHING: Final = DetectedShape(None, None, 0, 0.0)


def check(edit: NDArray[np.uint8], bare: NDArray[np.uint8], mask: Mask) -> DetectedShape:
    """Look at what an edit has painted.

    Args:
        edit: (height, width, 3) the edited picture.
        bare: (height, width, 3) the same scene with nothing in the mask.
        mask: (height, width) where the edit was allowed to paint.
    """
    box, *_ = ndimage.find_objects(mask.astype(np.uint8))
    seen = _segmented(edit[box], bare[box], mask[box], LEAST_PART * mask.sum())
    if seen is None:
        return NOTHING
    painted, thing = edit[box].astype(np.float32) / 255, seen.thing
    core = _core(thing)
    even = np.quantile(seen.towards[core], 0.75) <= EVENNESS
    name = _nearest_colour(np.median(painted[core], axis=0)) if even else None
    shape, overlap = _nearest_shape(thing)
    known = overlap >= LEAST_OVERLAP and seen.rest_px < SECOND_PART * thing.sum()
    known = known and thing.sum() <= FLOODED_PART * mask[box].sum()
    return DetectedShape(name, shape if known else None, int(thing.sum()), overlap)


def painted_thing(edit: NDArray[np.uint8], bare: NDArray[np.uint8], mask: Mask) -> Mask:
    """(height, width): the pixels of the thing that an edit has painted, however small; arguments as `check`'s."""
    found = np.zeros(mask.shape, bool)
    box, *_ = ndimage.find_objects(mask.astype(np.uint8))
    if seen := _segmented(edit[box], bare[box], mask[box], 1):
        found[box] = seen.thing
    return found


class _SegmentedShape(NamedTuple):
    """A thing in a mask's box."""

    thing: Mask
    rest_px: int
    """Area of the next largest part of its colour."""
    towards: NDArray[np.float32]
    """Distance of each pixel from the thing's colour."""


def _segmented(
    edit: NDArray[np.uint8], bare: NDArray[np.uint8], mask: Mask, least_px: float
) -> _SegmentedShape | None:
    """What is closer to the painted thing's colour than to the ground; None where it is below `least_px` pixels."""
    painted, ground = edit.astype(np.float32) / 255, bare.astype(np.float32) / 255
    away = np.linalg.norm(painted - ground, axis=2)
    first, _ = _largest(mask & (away > CHANGED))
    if first.sum() < least_px:
        return None
    colour = np.median(painted[_core(first)], axis=0)
    shades = np.stack([(colour * shade).clip(0, 1) for shade in SHADES])
    towards = np.linalg.norm(painted[:, :, None] - shades, axis=3).min(2)
    thing, rest_px = _largest(mask & (towards < away))
    thing = _without_specks(thing)
    return _SegmentedShape(thing, rest_px, towards) if thing.sum() >= least_px else None


def _largest(region: Mask) -> tuple[Mask, int]:
    """The largest connected part of `region`, and the area of the next one."""
    labels, n = ndimage.label(region)
    if n == 0:
        return region, 0
    areas = np.bincount(labels.ravel())[1:]
    second = int(np.sort(areas)[-2]) if n > 1 else 0
    return labels == areas.argmax() + 1, second


def _core(region: Mask) -> Mask:
    """`region` without its soft edge, where anything is left of it."""
    core: Mask = ndimage.binary_erosion(region, iterations=2)
    return core if core.sum() >= 0.2 * region.sum() else region


def _without_specks(region: Mask) -> Mask:
    labels, n = ndimage.label(~region)
    areas = np.bincount(labels.ravel(), minlength=n + 1)
    small = np.flatnonzero(areas < SPECK_PART * region.sum())
    filled: Mask = region | (np.isin(labels, small) & ~region)
    return filled


def _nearest_colour(colour: NDArray[np.float32]) -> str | None:
    """The palette's name for (3,) RGB, in any of `SHADES`."""
    gaps = {
        name: min(
            float(np.linalg.norm(colour - (rgb(name) * shade).clip(0, 1))) for shade in (0.95, 1.0, 1.05)
        )
        for name in COLOURS
    }
    name = min(gaps, key=gaps.__getitem__)
    return name if gaps[name] <= COLOUR_REACH else None


def _nearest_shape(thing: Mask) -> tuple[str, float]:
    """The outline with the largest intersection over union, and that."""
    names, outlines = _outlines()
    seen = _variants(thing)
    common = seen @ outlines.T
    union = seen.sum(1)[:, None] + outlines.sum(1)[None] - common
    overlaps = (common / union).max(0)
    best = int(overlaps.argmax())
    return names[best], float(overlaps[best])


def _variants(thing: Mask) -> NDArray[np.float32]:
    """(variants, FRAME * FRAME) coverage of `thing`, centred, at `FRAME_AREA`, in all `SIZES` and `SHIFTS_PX`."""
    centre = np.asarray(ndimage.center_of_mass(thing))
    scale = np.sqrt(thing.sum() / (FRAME_AREA * FRAME**2))
    soft = thing.astype(np.float32)
    rows = []
    for size in SIZES:
        step = scale * size
        for shift in ((v, u) for v in SHIFTS_PX for u in SHIFTS_PX):
            origin = centre - step * (np.asarray(shift) + (FRAME - 1) / 2)
            rows.append(ndimage.affine_transform(soft, [step, step], origin, (FRAME, FRAME), order=1).ravel())
    return np.stack(rows)


@cache
def _outlines() -> tuple[list[str], NDArray[np.float32]]:
    """Names, and (outlines, FRAME * FRAME) coverage of every shape in all `TURNS_DEG`."""
    names, rows = [], []
    for shape in SHAPES:
        for turn in TURNS_DEG:
            cover = coverage(SceneShape(shape, "black", 128, 128, 80, turn), 256)
            whole = np.zeros((256, 256), bool)
            height, width = cover.alpha.shape
            whole[cover.top : cover.top + height, cover.left : cover.left + width] = cover.alpha > 0.5
            names.append(shape)
            rows.append(_variants(whole)[len(SIZES) * len(SHIFTS_PX) ** 2 // 2])
    return names, np.stack(rows)


Pixels = NDArray[np.uint8]
PSNR_CEILING_DB: Final = 60.0
"""Told for pictures that are equal, whose true value is infinite, and for all above: means stay finite."""


def psnr_db(one: Pixels, other: Pixels, where: Mask | None = None) -> float:
    """Peak signal-to-noise ratio over the pixels of `where` (default all), at most `PSNR_CEILING_DB`.

    Raises:
        ValueError: `where` marks no pixel.
    """
    gaps = one.astype(np.float64) - other
    inside = gaps if where is None else gaps[where]
    if not inside.size:
        raise ValueError("the mask marks 0 pixels; PSNR needs 1 or more")
    mse = float((inside**2).mean())
    return PSNR_CEILING_DB if mse == 0 else min(float(10 * np.log10(255**2 / mse)), PSNR_CEILING_DB)


@dataclass(frozen=True)
class SeamGradients:
    """Gradients across a mask's border, summed: ratios of sums are ratios of means over any set of pictures."""

    edit: float
    truth: float
    """Sums of |difference| over channels and pairs, in [0, 1] each."""
    pairs: int

    @property
    def ratio(self) -> float:
        """Mean gradient of the edit over that of the truth; nan where neither has any, inf where only the edit has."""
        if self.truth == 0:
            return float("nan") if self.edit == 0 else float("inf")
        return self.edit / self.truth


def seam(edit: Pixels, truth: Pixels, mask: Mask) -> SeamGradients:
    """Gradients between 4-neighbours that the mask's border separates, in `edit` and in `truth`."""
    sums, pairs = [0.0, 0.0], 0
    for axis in (0, 1):
        across = np.diff(mask.astype(np.int8), axis=axis) != 0
        pairs += int(across.sum())
        for i, picture in enumerate((edit, truth)):
            steps = np.abs(np.diff(picture.astype(np.float64), axis=axis))[across]
            sums[i] += float(steps.sum()) / (255 * 3)
    return SeamGradients(sums[0], sums[1], pairs)


def together(seams: Iterable[SeamGradients]) -> SeamGradients:
    """One seam for all: its ratio is the ratio of the means over all pairs of all pictures."""
    every = list(seams)
    return SeamGradients(sum(s.edit for s in every), sum(s.truth for s in every), sum(s.pairs for s in every))


@dataclass(frozen=True)
class ScoredAddition:
    """An edit that was to paint a thing."""

    case: QualityCase
    edit: Pixels
    found: DetectedShape

    @property
    def colour_right(self) -> bool:
        """Return whether the colour is the one asked for."""
        return self.found.colour == self.case.slot.colour

    @property
    def shape_right(self) -> bool:
        """Return whether the shape is the one asked for."""
        return self.found.shape == self.case.slot.shape

    @property
    def both_right(self) -> bool:
        """Return whether both are."""
        return self.colour_right and self.shape_right


@dataclass(frozen=True)
class ScoredRemoval:
    """An edit that was to complete the background; both figures are of the pixels in the mask."""

    case: QualityCase
    edit: Pixels
    psnr_db: float
    ssim: float
    seam: SeamGradients


Scored = ScoredAddition | ScoredRemoval


def score(case: QualityCase, edit: Pixels) -> Scored:
    """Measure one edit."""
    scene = case.scene
    if case.slot.task is SceneTask.ADD:
        return ScoredAddition(case, edit, check(edit, case.bare, scene.mask))
    truth, mask = scene.after, scene.mask
    return ScoredRemoval(
        case, edit, psnr_db(edit, truth, mask), ssim(edit, truth, mask), seam(edit, truth, mask)
    )


def strayed_px(case: QualityCase, edit: Pixels, mask_blur: float | None) -> int:
    """Pixels outside the mask, and a feather that was asked for, that are not as they were; there may be none."""
    allowed = effective_alpha(case.scene.mask, 0, mask_blur) > 0
    return int(((edit != case.scene.before).any(2) & ~allowed).sum())
