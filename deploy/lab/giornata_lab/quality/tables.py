"""The report as tables, for the terminal and for the page. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from rich.table import Table
from rich.text import Text

from giornata_lab.quality.report import (
    AdditionAccuracy,
    QualityGate,
    QualityReport,
    RemovalQuality,
    RunComparison,
)
from giornata_tools.tables import table

G = TypeVar("G")

PATCH_HEAD: Final = ("edits", "PSNR dB", "10 % below", "SSIM", "seam ratio", "gradient", "true one")
RATE_HEAD: Final = ("edits", "both right", "colour", "shape")


@dataclass(frozen=True)
class ReportTable:
    """A table of texts; the first column names the row."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def sheets(report: QualityReport) -> list[ReportTable]:
    """Every table of the report beside the gates."""
    found = []
    if a := report.adherence:
        groups = {"all": a.overall, **_in_px(a.by_side), **a.by_ground}
        found.append(ReportTable("(a) Prompt adherence", ("ground", *RATE_HEAD), _rates(groups)))
        found += [
            ReportTable(f"(a) by {name}", (name, *RATE_HEAD), _rates(rates))
            for name, rates in (("shape", a.by_shape), ("colour", a.by_colour))
        ]
    if c := report.completion:
        patches = {"all": c.overall, **_in_px(c.by_side), **c.by_ground}
        found.append(
            ReportTable("(b), (c) Background completion", ("ground", *PATCH_HEAD), _patches(patches))
        )
    if f := report.frechet:
        rows = (
            ("edits to truths", f"{f.edit_to_truth:.2f}"),
            ("unedited to truths", f"{f.unedited_to_truth:.2f}"),
            ("half of the truths to the other", f"{f.between_halves:.2f}"),
        )
        found.append(ReportTable("(d) Fréchet distance of additions", ("", "distance"), rows))
    if report.closeness:
        found.append(_closeness(report.closeness))
    return found


def accepted(gate: QualityGate) -> str:
    """What a gate accepts, in words."""
    low = "" if gate.at_least is None else f"{gate.at_least:g}"
    high = "" if gate.at_most is None else f"{gate.at_most:g}"
    if low and high:
        return f"{low} to {high}"
    return f"at least {low}" if low else f"at most {high}"


def measured(gate: QualityGate) -> str:
    """What was measured for a gate, in words."""
    return "not measured" if gate.measured is None else f"{gate.measured:.4g}"


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


def rich_tables(report: QualityReport) -> list[Table]:
    """All tables for the terminal, the gates last."""
    drawn = []
    for sheet in sheets(report):
        lines = table(*sheet.head, numbers=sheet.head[1:], title=sheet.title)
        for row in sheet.rows:
            lines.add_row(*row)
        drawn.append(lines)
    verdicts = table("", "measured", "accepted", "verdict", numbers={"measured"}, prose={""}, title="Gates")
    for gate in report.gates:
        verdict = Text("holds", "green") if gate.holds else Text("FAILS", "bold red")
        verdicts.add_row(gate.name, measured(gate), accepted(gate), verdict)
    return [*drawn, verdicts]


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


def _closeness(c: RunComparison) -> ReportTable:
    rows = (
        ("edits compared", str(c.n)),
        ("of these equal in every pixel", str(c.identical)),
        ("SSIM, whole picture", f"{c.ssim:.4f}"),
        ("SSIM, in the mask", f"{c.ssim_in_mask:.4f}"),
        ("PSNR, whole picture, dB", f"{c.psnr_db:.2f}"),
        ("PSNR, in the mask, dB", f"{c.psnr_in_mask_db:.2f}"),
        ("Fréchet distance", "-" if c.frechet is None else f"{c.frechet:.3f}"),
    )
    return ReportTable(
        f"(d) Against {c.folder} ({c.other.model}, {c.other.steps} steps)", ("", "value"), rows
    )
