"""What is measured of each edit. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from giornata_lab.model.scenes import SceneTask
from giornata_lab.quality.cases import QualityCase
from giornata_lab.quality.checker import DetectedShape, check
from giornata_lab.quality.metrics import Pixels, SeamGradients, psnr_db, seam
from giornata_prepost.images.masks import effective_alpha
from giornata_tools.joining.shares import ssim


@dataclass(frozen=True)
class ScoredAddition:
    """An edit that was to paint a thing."""

    case: QualityCase
    edit: Pixels
    found: DetectedShape

    @property
    def colour_right(self) -> bool:
        """Whether the colour is the one asked for."""
        return self.found.colour == self.case.slot.colour

    @property
    def shape_right(self) -> bool:
        """Whether the shape is the one asked for."""
        return self.found.shape == self.case.slot.shape

    @property
    def both_right(self) -> bool:
        """Whether both are."""
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
