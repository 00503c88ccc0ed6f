"""What was measured, as one value, and whether it is good enough. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

import numpy as np
from pydantic import BaseModel, computed_field

from giornata.wire.requests import EditParameters, Reuse
from giornata_lab.model.scenes import SceneTask
from giornata_lab.quality.metrics import Pixels, Scored, ScoredAddition, ScoredRemoval, psnr_db, together
from giornata_tools.lora_profiler.profiler import ssim

S = TypeVar("S")
M = TypeVar("M")

LEAST_BOTH_RIGHT: Final = 0.90
LEAST_PSNR_DB: Final = 24.0
SEAM_RATIO: Final = (0.8, 1.2)


class MaskBlur(BaseModel):
    """Feather of the paste in pixels, by what an edit is to do.

    A feather goes outward, and the model paints below it: a thing to be added may then reach beyond the mask, where
    the checker does not look. So things are added with a hard edge, unless told otherwise, and removed as users get it.
    None is the soft edge inside of the mask that requests have by default.
    """

    add: float | None = 0.0
    remove: float | None = EditParameters.model_fields["mask_blur"].default

    def of(self, task: SceneTask) -> float | None:
        """The feather of an edit of that kind."""
        return self.remove if task is SceneTask.REMOVE else self.add


class QualityRun(BaseModel):
    """What made the pictures; also lies beside them, for later runs to compare with."""

    model: str
    model_digest: str
    family: str
    steps: int
    guidance_scale: float | None
    """None where the model takes none."""
    mask_blur: MaskBlur
    reuse: Reuse = Reuse.OFF
    """What requests asked for; runs from before it could be chosen had none."""
    cases: int
    of_cases: int
    """Size of the whole set; more than `cases` in a quick look."""
    cases_digest: str
    seeds: str
    in_flight: int
    edits_s: float
    """Seconds from the first request to the last picture."""
    edit_ms_p50: float
    edit_ms_p95: float
    """Time of one edit, waiting included."""
    machine: dict[str, str | int]
    versions: dict[str, str]


class AdditionAccuracy(BaseModel):
    """How many additions are right, as parts of `n`."""

    n: int
    both: float
    colour: float
    shape: float


class PromptAdherence(BaseModel):
    """(a) Do edits show what was asked for?"""

    overall: AdditionAccuracy
    by_side: dict[str, AdditionAccuracy]
    by_shape: dict[str, AdditionAccuracy]
    by_colour: dict[str, AdditionAccuracy]
    by_ground: dict[str, AdditionAccuracy]


class RemovalQuality(BaseModel):
    """Means over removals, of the pixels in the mask."""

    n: int
    psnr_db: float
    """Mean over pictures."""
    psnr_db_p10: float
    ssim: float
    seam_ratio: float | None
    """Mean gradient across the border over that of the truth, over all pairs; None where the truth has none."""
    seam_edit: float
    seam_truth: float
    """The two means, in 8-bit steps."""


class BackgroundCompletion(BaseModel):
    """(b), (c) Is the background completed as it was?"""

    overall: RemovalQuality
    by_side: dict[str, RemovalQuality]
    by_ground: dict[str, RemovalQuality]


class RunComparison(BaseModel):
    """(d) This run's pictures against an earlier run's, picture by picture."""

    folder: str
    other: QualityRun
    n: int
    identical: int
    ssim: float
    ssim_in_mask: float
    psnr_db: float
    psnr_in_mask_db: float
    """Means over pictures; equal ones count as `giornata_lab.quality.metrics.PSNR_CEILING_DB`."""
    ssim_in_mask_median: float
    ssim_in_mask_p5: float
    ssim_in_mask_least: float


class QualityGate(BaseModel):
    """One thing that has to hold."""

    name: str
    measured: float | None
    """None where there is nothing to measure; then it does not hold."""
    at_least: float | None = None
    at_most: float | None = None

    @computed_field  # type: ignore[prop-decorator] # as pydantic's manual has it: mypy knows no decorated property
    @property
    def holds(self) -> bool:
        """Return whether the gate holds."""
        if self.measured is None or np.isnan(self.measured):
            return False
        low = -np.inf if self.at_least is None else self.at_least
        high = np.inf if self.at_most is None else self.at_most
        return bool(low <= self.measured <= high)


class QualityReport(BaseModel):
    """``out/quality.json``."""

    run: QualityRun
    gates: list[QualityGate]
    strayed_px: int
    """Pixels outside of masks that changed, over all edits."""
    adherence: PromptAdherence | None
    completion: BackgroundCompletion | None
    closeness: RunComparison | None

    @computed_field  # type: ignore[prop-decorator] # as pydantic's manual has it: mypy knows no decorated property
    @property
    def holds(self) -> bool:
        """Return whether every gate holds."""
        return all(gate.holds for gate in self.gates)


def adherence(additions: Sequence[ScoredAddition]) -> PromptAdherence | None:
    """Rates overall and by group; None without additions."""
    if not additions:
        return None
    return PromptAdherence(
        overall=_rate(additions),
        by_side=_grouped(additions, lambda a: str(a.case.slot.side), _rate),
        by_shape=_grouped(additions, lambda a: a.case.slot.shape, _rate),
        by_colour=_grouped(additions, lambda a: a.case.slot.colour, _rate),
        by_ground=_grouped(additions, lambda a: a.case.slot.ground, _rate),
    )


def completion(removals: Sequence[ScoredRemoval]) -> BackgroundCompletion | None:
    """Means overall and by group; None without removals."""
    if not removals:
        return None
    return BackgroundCompletion(
        overall=_patch(removals),
        by_side=_grouped(removals, lambda r: str(r.case.slot.side), _patch),
        by_ground=_grouped(removals, lambda r: r.case.slot.ground, _patch),
    )


def gates(
    of_additions: PromptAdherence | None, of_removals: BackgroundCompletion | None, strayed: int
) -> list[QualityGate]:
    """Return what has to hold: (a), (b), (c), and that nothing changes outside of masks."""
    patch = of_removals.overall if of_removals else None
    low, high = SEAM_RATIO
    both = of_additions.overall.both if of_additions else None
    return [
        QualityGate(name="(a) colour and shape right", measured=both, at_least=LEAST_BOTH_RIGHT),
        QualityGate(
            name="(b) PSNR in the mask, dB", measured=patch.psnr_db if patch else None, at_least=LEAST_PSNR_DB
        ),
        QualityGate(
            name="(c) seam ratio", measured=patch.seam_ratio if patch else None, at_least=low, at_most=high
        ),
        QualityGate(name="pixels changed outside", measured=strayed, at_most=0),
    ]


def closeness(pairs: Iterable[tuple[Scored, Pixels]], folder: str, other: QualityRun) -> RunComparison:
    """This run's edits against those of `other`; at least one pair."""
    rows = [
        (
            float(np.array_equal(scored.edit, theirs)),
            ssim(scored.edit, theirs),
            ssim(scored.edit, theirs, scored.case.scene.mask),
            psnr_db(scored.edit, theirs),
            psnr_db(scored.edit, theirs, scored.case.scene.mask),
        )
        for scored, theirs in pairs
    ]
    _, whole_ssim, mask_ssim, whole_psnr, mask_psnr = (float(x) for x in np.mean(rows, axis=0))
    median, p5, least = (float(x) for x in np.quantile([row[2] for row in rows], (0.5, 0.05, 0)))
    return RunComparison(
        folder=folder,
        other=other,
        n=len(rows),
        identical=int(sum(row[0] for row in rows)),
        ssim=whole_ssim,
        ssim_in_mask=mask_ssim,
        psnr_db=whole_psnr,
        psnr_in_mask_db=mask_psnr,
        ssim_in_mask_median=median,
        ssim_in_mask_p5=p5,
        ssim_in_mask_least=least,
    )


def _grouped(of: Sequence[S], key: Callable[[S], str], measure: Callable[[Sequence[S]], M]) -> dict[str, M]:
    keys = dict.fromkeys(key(one) for one in of)
    return {k: measure([one for one in of if key(one) == k]) for k in keys}


def _rate(additions: Sequence[ScoredAddition]) -> AdditionAccuracy:
    n = len(additions)
    return AdditionAccuracy(
        n=n,
        both=sum(a.both_right for a in additions) / n,
        colour=sum(a.colour_right for a in additions) / n,
        shape=sum(a.shape_right for a in additions) / n,
    )


def _patch(removals: Sequence[ScoredRemoval]) -> RemovalQuality:
    border = together(r.seam for r in removals)
    per_pair = 255 / max(border.pairs, 1)
    values = [r.psnr_db for r in removals]
    return RemovalQuality(
        n=len(removals),
        psnr_db=float(np.mean(values)),
        psnr_db_p10=float(np.quantile(values, 0.1)),
        ssim=float(np.mean([r.ssim for r in removals])),
        seam_ratio=border.ratio if border.truth else None,
        seam_edit=border.edit * per_pair,
        seam_truth=border.truth * per_pair,
    )
