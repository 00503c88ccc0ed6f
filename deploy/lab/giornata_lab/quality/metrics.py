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

# How far two pictures, or two sets of pictures, are apart. Pure.
#
# Pictures are (height, width, 3) uint8 unless said otherwise; masks (height, width) bool.


Pixels = NDArray[np.uint8]
Features = NDArray[np.float64]
"""(pictures, features)."""
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


def frechet(one: Features, other: Features) -> float:
    """Fréchet distance between Gaussians fitted to two sets of features (Heusel et al., 2017).

    |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)), the root by C1's own, so that only symmetric matrices are decomposed.

    Raises:
        ValueError: a set has fewer than two pictures, or the features are not the same ones.
    """
    if min(len(one), len(other)) < 2 or one.shape[1] != other.shape[1]:
        raise ValueError(
            f"received features {one.shape} and {other.shape}; both need 2 rows or more, equal columns"
        )
    first, second = (np.atleast_2d(np.cov(features, rowvar=False)) for features in (one, other))
    root = _root(first)
    cross = np.linalg.eigvalsh(root @ second @ root).clip(0)
    apart = float(((one.mean(0) - other.mean(0)) ** 2).sum())
    return max(apart + float(np.trace(first) + np.trace(second) - 2 * np.sqrt(cross).sum()), 0.0)


def _root(covariance: NDArray[np.float64]) -> NDArray[np.float64]:
    values, vectors = np.linalg.eigh(covariance)
    root: NDArray[np.float64] = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    return root


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
