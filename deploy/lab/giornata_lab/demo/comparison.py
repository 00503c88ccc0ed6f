"""The side-by-side picture: what went in, what was marked, what came out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont
from scipy.ndimage import binary_erosion

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
