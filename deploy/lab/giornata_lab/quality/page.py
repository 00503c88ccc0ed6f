"""The report as tables, and as one self-contained page, failures first. Pure."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final, TypeVar

from PIL import Image
from rich.table import Table
from rich.text import Text
from scipy import ndimage

from giornata_lab.model.scenes.shapes import Mask
from giornata_lab.quality.metrics import Pixels, Scored, ScoredAddition, ScoredRemoval
from giornata_lab.quality.report import (
    LEAST_PSNR_DB,
    AdditionAccuracy,
    QualityGate,
    QualityReport,
    RemovalQuality,
    RunComparison,
)
from giornata_tools.terminal import table

# The report as tables, for the terminal and for the page. Pure.


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
    if report.closeness:
        found.append(_closeness(report.closeness))
    return found


def accepted(gate: QualityGate) -> str:
    """Return what a gate accepts, in words."""
    low = "" if gate.at_least is None else f"{gate.at_least:g}"
    high = "" if gate.at_most is None else f"{gate.at_most:g}"
    if low and high:
        return f"{low} to {high}"
    return f"at least {low}" if low else f"at most {high}"


def measured(gate: QualityGate) -> str:
    """Return what was measured for a gate, in words."""
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
    )
    return ReportTable(
        f"(d) Against {c.folder} ({c.other.model}, {c.other.steps} steps)", ("", "value"), rows
    )


# The report as one self-contained page: verdicts, tables, and every edit with its picture, failures first.
# Pure.


STYLE: Final = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
WEBP_QUALITY: Final = 82
WIDE_COLUMNS: Final = 6
"""Tables of more columns get the page's whole width."""


def page(report: QualityReport, scored: Sequence[Scored]) -> str:
    """The HTML document."""
    additions = [s for s in scored if isinstance(s, ScoredAddition)]
    removals = sorted((s for s in scored if isinstance(s, ScoredRemoval)), key=lambda r: r.psnr_db)
    wrong = [a for a in additions if not a.both_right]
    right = [a for a in additions if a.both_right]
    below = [r for r in removals if r.psnr_db < LEAST_PSNR_DB]
    above = [r for r in removals if r.psnr_db >= LEAST_PSNR_DB]
    verdict = "Every gate holds" if report.holds else "Not every gate holds"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(report.run.model)}: quality</title>
<style>
{STYLE}</style>
</head>
<body>
<header>
<h1>{verdict}</h1>
<p>{escape(described(report))}</p>
</header>
<main>
<ul class="gates">
{"".join(_gate(gate) for gate in report.gates)}</ul>
<div class="tables">
{"".join(_table(sheet) for sheet in sheets(report))}</div>
<p>Each picture: before, with the mask outlined; the edit; the truth. In an addition the edit may place and size the
thing differently from the truth.</p>
{_section("Additions that are wrong", wrong, is_open=True)}
{_section(f"Removals below {LEAST_PSNR_DB:g} dB", below, is_open=True)}
{_section(f"Removals of {LEAST_PSNR_DB:g} dB and above", above, is_open=not (wrong or below))}
{_section("Additions that are right", right, is_open=not (wrong or below))}
</main>
</body>
</html>
"""


def panels(scored: Scored) -> dict[str, Pixels]:
    """Return what is shown of an edit, by its name; (side, side, 3) each."""
    scene = scored.case.scene
    return {"before": outlined(scene.before, scene.mask), "edit": scored.edit, "truth": scene.after}


def outlined(picture: Pixels, mask: Mask) -> Pixels:
    """`picture` with the mask's border drawn around it, white beside black, so that any ground shows it."""
    drawn = picture.copy()
    drawn[ndimage.binary_dilation(mask) & ~mask] = 255
    drawn[mask & ~ndimage.binary_erosion(mask)] = 0
    return drawn


def _gate(gate: QualityGate) -> str:
    state = "holds" if gate.holds else "fails"
    return (
        f'<li class="{state}">{escape(gate.name)}<b>{measured(gate)}</b>'
        f'<span>{accepted(gate)}: </span><span class="verdict">{state}</span></li>\n'
    )


def _table(sheet: ReportTable) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in sheet.head)
    rows = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>\n'
        for row in sheet.rows
    )
    wide = " wide" if len(sheet.head) > WIDE_COLUMNS else ""
    return (
        f'<div class="scroll{wide}"><table><caption>{escape(sheet.title)}</caption>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody></table></div>\n"
    )


def _section(title: str, scored: Sequence[Scored], *, is_open: bool) -> str:
    if not scored:
        return ""
    figures = "".join(_figure(one) for one in scored)
    return (
        f"<details{' open' if is_open else ''}><summary><h2>{escape(title)} ({len(scored)})</h2></summary>\n"
        f'<div class="edits">\n{figures}</div></details>'
    )


def _figure(scored: Scored) -> str:
    slot, caption = scored.case.slot, scored.case.scene.caption
    state, seen = _verdict(scored)
    images = "".join(
        f'<img loading="lazy" decoding="async" alt="{name}" title="{name}" src="{_data_url(picture)}">'
        for name, picture in panels(scored).items()
    )
    return (
        f"<figure><div>{images}</div>"
        f'<figcaption class="{state}"><span>{escape(caption)}</span><span class="verdict">{escape(seen)}</span>'
        f"<small>{escape(slot.name)} on {slot.ground}</small></figcaption></figure>\n"
    )


def _verdict(scored: Scored) -> tuple[str, str]:
    """Class and words."""
    if isinstance(scored, ScoredRemoval):
        state = "holds" if scored.psnr_db >= LEAST_PSNR_DB else "fails"
        return state, f"{scored.psnr_db:.1f} dB, SSIM {scored.ssim:.2f}"
    if scored.both_right:
        return "holds", "right"
    if not scored.found.area_px:
        return "fails", "nothing was painted"
    return (
        "fails",
        f"seen: {scored.found.colour or 'no known colour'}, {scored.found.shape or 'no known shape'}",
    )


def _data_url(picture: Pixels) -> str:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "WEBP", quality=WEBP_QUALITY)
    return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"
