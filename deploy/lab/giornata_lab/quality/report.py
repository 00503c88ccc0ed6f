"""What was measured, as one value and as tables, and whether it is good enough. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeVar

import numpy as np
from pydantic import BaseModel, computed_field
from rich.table import Table
from rich.text import Text

from giornata.wire.requests import EditParameters, Reuse
from giornata_lab.model.scenes import SceneTask
from giornata_lab.quality.metrics import Pixels, Scored, ScoredAddition, ScoredRemoval, psnr_db, together
from giornata_tools.lora_profiler.profiler import ssim
from giornata_tools.terminal import table

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


G = TypeVar("G")

PATCH_HEAD: Final = ("edits", "PSNR dB", "10 % below", "SSIM", "seam ratio", "gradient", "true one")
RATE_HEAD: Final = ("edits", "both right", "colour", "shape")
Rows = Sequence[tuple[str, ...]]


def tables(report: QualityReport) -> list[Table]:
    """All tables for the terminal, the gates last."""
    found = []
    if a := report.adherence:
        groups = {"all": a.overall, **_in_px(a.by_side), **a.by_ground}
        found.append(_drawn("(a) Prompt adherence", ("ground", *RATE_HEAD), _rates(groups)))
        found += [
            _drawn(f"(a) by {name}", (name, *RATE_HEAD), _rates(rates))
            for name, rates in (("shape", a.by_shape), ("colour", a.by_colour))
        ]
    if c := report.completion:
        patches = {"all": c.overall, **_in_px(c.by_side), **c.by_ground}
        found.append(_drawn("(b), (c) Background completion", ("ground", *PATCH_HEAD), _patches(patches)))
    if report.closeness:
        found.append(_closeness(report.closeness, report.run))
    verdicts = table("", "measured", "accepted", "verdict", numbers={"measured"}, prose={""}, title="Gates")
    for gate in report.gates:
        bounds = {"at least": gate.at_least, "at most": gate.at_most}
        accepted = ", ".join(f"{name} {value:g}" for name, value in bounds.items() if value is not None)
        measured = "not measured" if gate.measured is None else f"{gate.measured:.4g}"
        verdict = Text("holds", "green") if gate.holds else Text("FAILS", "bold red")
        verdicts.add_row(gate.name, measured, accepted, verdict)
    return [*found, verdicts]


def described(report: QualityReport) -> str:
    """One sentence about what was run."""
    run = report.run
    guidance = "" if run.guidance_scale is None else f", guidance {run.guidance_scale:g}"
    some = f"{run.cases} edits" if run.cases == run.of_cases else f"{run.cases} of {run.of_cases} edits"
    add, remove = ("inside" if px is None else f"{px:g}" for px in (run.mask_blur.add, run.mask_blur.remove))
    blur = f"{add} to add and {remove} to remove"
    return (
        f"{run.model} ({run.model_digest[:12]}): {some}, {run.steps} steps{guidance}, mask blur {blur}, "
        f"reuse {run.reuse}; "
        f"{run.edits_s:.0f} s, {run.edit_ms_p50:.0f} ms an edit (p50, {run.in_flight} at a time)."
    )


def _drawn(title: str, head: tuple[str, ...], rows: Rows) -> Table:
    """A table of texts; the first column names the row."""
    lines = table(*head, numbers=head[1:], title=title)
    for row in rows:
        lines.add_row(*row)
    return lines


def _in_px(groups: Mapping[str, G]) -> dict[str, G]:
    return {f"{side} px": value for side, value in groups.items()}


def _rates(groups: Mapping[str, AdditionAccuracy]) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (name, str(r.n), f"{r.both:.1%}", f"{r.colour:.1%}", f"{r.shape:.1%}") for name, r in groups.items()
    )


def _patches(groups: Mapping[str, RemovalQuality]) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (
            name,
            str(p.n),
            f"{p.psnr_db:.2f}",
            f"{p.psnr_db_p10:.2f}",
            f"{p.ssim:.3f}",
            "-" if p.seam_ratio is None else f"{p.seam_ratio:.2f}",
            f"{p.seam_edit:.2f}",
            f"{p.seam_truth:.2f}",
        )
        for name, p in groups.items()
    )


def _closeness(c: RunComparison, run: QualityRun) -> Table:
    median, p5, least = c.ssim_in_mask_median, c.ssim_in_mask_p5, c.ssim_in_mask_least
    alike = c.other.cases_digest == run.cases_digest
    rows = (
        ("its seconds ÷ this run's", f"{c.other.edits_s / run.edits_s:.2f}" if alike else "other edits"),
        ("edits compared", str(c.n)),
        ("of these equal in every pixel", str(c.identical)),
        ("SSIM, whole picture", f"{c.ssim:.4f}"),
        ("SSIM, in the mask", f"{c.ssim_in_mask:.4f}"),
        ("its median; 5 % below; least", f"{median:.4f}; {p5:.4f}; {least:.4f}"),
        ("PSNR, whole picture, dB", f"{c.psnr_db:.2f}"),
        ("PSNR, in the mask, dB", f"{c.psnr_in_mask_db:.2f}"),
    )
    return _drawn(f"(d) Against {c.folder} ({c.other.model}, {c.other.steps} steps)", ("", "value"), rows)


SHOWN: Final = 24
"""Edits in the picture, at most."""


def failures(scored: Sequence[Scored]) -> Pixels | None:
    """Edits that fail, one below the other: before, with the mask lighter, the edit, the truth; None where none does.

    In an addition the edit may place and size the thing differently from the truth.
    """
    failed = [one for one in scored if _fails(one)]
    rows = []
    for one in failed[:SHOWN]:
        scene = one.case.scene
        before = np.where(scene.mask[..., None], scene.before // 2 + 127, scene.before)
        row = np.concatenate([before, one.edit, scene.after], axis=1)
        side = max(len(each.edit) for each in failed[:SHOWN])
        space = ((0, 0), (0, 3 * side - row.shape[1]), (0, 0))
        rows.append(np.pad(row, space, constant_values=255).astype(np.uint8))
    return np.concatenate(rows) if rows else None


def _fails(one: Scored) -> bool:
    return one.psnr_db < LEAST_PSNR_DB if isinstance(one, ScoredRemoval) else not one.both_right
