"""The report as one self-contained page: verdicts, tables, and every edit with its picture, failures first. Pure."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final

from PIL import Image
from scipy import ndimage

from giornata_lab.model.scenes.masks import Mask
from giornata_lab.quality import tables
from giornata_lab.quality.metrics import Pixels
from giornata_lab.quality.report import LEAST_PSNR_DB, QualityGate, QualityReport
from giornata_lab.quality.scoring import Scored, ScoredAddition, ScoredRemoval
from giornata_lab.quality.tables import ReportTable

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
<p>{escape(tables.described(report))}</p>
</header>
<main>
<ul class="gates">
{"".join(_gate(gate) for gate in report.gates)}</ul>
<div class="tables">
{"".join(_table(sheet) for sheet in tables.sheets(report))}</div>
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
    """What is shown of an edit, by its name; (side, side, 3) each."""
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
        f'<li class="{state}">{escape(gate.name)}<b>{tables.measured(gate)}</b>'
        f'<span>{tables.accepted(gate)}: </span><span class="verdict">{state}</span></li>\n'
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
