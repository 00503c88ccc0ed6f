"""The pictures that the demo writes: those of each edit, and sheets that compare them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont
from scipy.ndimage import binary_erosion

from giornata_lab.demo.report import WORDS, AdapterEdit, DemoEdit

# The side-by-side picture: what went in, what was marked, what came out. Pure.


MARGIN: Final = 16
CAPTION_HEIGHT: Final = 40
PAPER: Final = (250, 249, 246)
INK: Final = (40, 40, 40)
TINT: Final = (230, 30, 90)
TINT_SHARE: Final = 0.55


def overlay(image: Image.Image, alpha: npt.NDArray[np.float32]) -> Image.Image:
    """`image` tinted by `alpha` (height, width) in 0..1; a lighter line runs where the feather ends."""
    pixels = np.asarray(image.convert("RGB")).astype(np.float32)
    share = TINT_SHARE * alpha[..., None]
    tinted = pixels * (1 - share) + np.array(TINT, np.float32) * share
    edited = alpha > 0
    tinted[edited & ~binary_erosion(edited)] = 255
    return Image.fromarray(tinted.round().astype(np.uint8))


def stacked(rows: Sequence[Image.Image]) -> Image.Image:
    """Pictures below each other, each in the middle."""
    sheet = Image.new("RGB", (max(row.width for row in rows), sum(row.height for row in rows)), PAPER)
    top = 0
    for row in rows:
        sheet.paste(row, ((sheet.width - row.width) // 2, top))
        top += row.height
    return sheet


def side_by_side(panels: Sequence[tuple[Image.Image, str]]) -> Image.Image:
    """Pictures of one size in a row, each with its caption below."""
    width, height = panels[0][0].size
    sheet = Image.new(
        "RGB", (MARGIN + len(panels) * (width + MARGIN), 2 * MARGIN + height + CAPTION_HEIGHT), PAPER
    )
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=18)
    for index, (picture, caption) in enumerate(panels):
        left = MARGIN + index * (width + MARGIN)
        sheet.paste(picture.convert("RGB"), (left, MARGIN))
        middle = (left + width / 2, MARGIN + height + (MARGIN + CAPTION_HEIGHT) / 2)
        draw.text(middle, caption, INK, font, anchor="mm")
    return sheet


# The pictures that the demo writes: those of each edit, and sheets that compare them.


EDIT_HEIGHT: Final = 360
"""Height of a picture in the comparison, in pixels."""
ADAPTER_HEIGHT: Final = 256
"""The same where adapters are compared."""


def write(edits: Sequence[DemoEdit], adapters: Sequence[AdapterEdit], out: Path) -> None:
    """Write a folder for each into `out`, and a sheet of all edits and one of all adapters, where there are any."""
    for done in edits:
        _write_edit(done, out / done.exhibit.name)
    stacked([_row(done) for done in edits]).save(out / "comparison.png")
    for adapted in adapters:
        folder = out / adapted.adapter.name
        _write_edit(adapted.under, folder)
        (folder / "without.png").write_bytes(adapted.without.picture)
    if adapters:
        stacked(list(map(_adapter_row, adapters))).save(out / "adapters.png")


def _write_edit(done: DemoEdit, folder: Path) -> None:
    folder.mkdir()
    done.exhibit.picture.save(folder / "input.png")
    done.exhibit.mask.save(folder / "mask.png")
    if done.exhibit.control is not None:
        done.exhibit.control.save(folder / "control.png")
    (folder / "output.png").write_bytes(done.picture)


def _row(done: DemoEdit) -> Image.Image:
    exhibit = done.exhibit
    output = f"output: {done.figures.steps} steps, {done.latency_s:.2f} s"
    panels = ((exhibit.picture, "input"), _asked(done), (Image.fromarray(done.after), output))
    return side_by_side([(_scaled(picture, EDIT_HEIGHT), caption) for picture, caption in panels])


def _adapter_row(adapted: AdapterEdit) -> Image.Image:
    control = adapted.under.exhibit.control
    panels = (
        _asked(adapted.without),
        *(() if control is None else ((control, "control image"),)),
        (Image.fromarray(adapted.without.after), "without"),
        (
            Image.fromarray(adapted.under.after),
            f"with the {WORDS[adapted.adapter.kind]} {adapted.adapter.name}",
        ),
    )
    return side_by_side([(_scaled(picture, ADAPTER_HEIGHT), caption) for picture, caption in panels])


def _asked(done: DemoEdit) -> tuple[Image.Image, str]:
    asked = done.exhibit.parameters
    words = "" if asked.mask_prompt is None else f'"{asked.mask_prompt}": '
    return overlay(done.exhibit.picture, done.alpha), f'{words}"{asked.prompt}"'


def _scaled(picture: Image.Image, height: int) -> Image.Image:
    width = round(picture.width * height / picture.height)
    return picture.resize((width, height), Image.Resampling.LANCZOS)
