"""What is measured of each edit, and how far pictures are apart. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from giornata_lab.model.scenes import SceneTask
from giornata_lab.model.scenes.shapes import Mask
from giornata_lab.quality.cases import QualityCase
from giornata_lab.quality.checker import DetectedShape, check
from giornata_prepost.images.masks import effective_alpha
from giornata_tools.lora_profiler.profiler import ssim

# How far two pictures are apart. Pure.
#
# Pictures are (height, width, 3) uint8 unless said otherwise; masks (height, width) bool.


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


# What is measured of each edit. Pure.


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
