"""The report as tables for the terminal, and a picture of the edits that fail. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

import numpy as np
from rich.table import Table
from rich.text import Text

from giornata_lab.quality.metrics import Pixels, Scored, ScoredRemoval
from giornata_lab.quality.report import (
    LEAST_PSNR_DB,
    AdditionAccuracy,
    QualityReport,
    QualityRun,
    RemovalQuality,
    RunComparison,
)
from giornata_tools.terminal import table

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
