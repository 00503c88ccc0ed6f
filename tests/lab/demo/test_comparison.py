"""The demo's side-by-side picture."""

from __future__ import annotations

import numpy as np
from PIL import Image

from giornata_lab.demo.pictures import CAPTION_HEIGHT, INK, MARGIN, PAPER, overlay, side_by_side


def grey(value: int, size: tuple[int, int] = (60, 40)) -> Image.Image:
    return Image.new("RGB", size, (value, value, value))


def test_overlay_leaves_what_is_not_edited_and_tints_what_is() -> None:
    alpha = np.zeros((40, 60), np.float32)
    alpha[10:30, 10:30] = 1
    tinted = np.asarray(overlay(grey(100), alpha))
    assert (tinted[alpha == 0] == 100).all()
    inside = tinted[15:25, 15:25].reshape(-1, 3)
    assert (inside[:, 0] > inside[:, 1]).all(), "reddish"
    assert (tinted[10, 10:30] == 255).all(), "the rim is drawn"


def test_panels_lie_side_by_side_with_captions_below() -> None:
    sheet = side_by_side([(grey(10), "input"), (grey(90), "mask"), (grey(200), "output")])
    assert sheet.size == (3 * 60 + 4 * MARGIN, 40 + 2 * MARGIN + CAPTION_HEIGHT)
    pixels = np.asarray(sheet)
    for index, value in enumerate((10, 90, 200)):
        left = MARGIN + index * (60 + MARGIN)
        assert (pixels[MARGIN : MARGIN + 40, left : left + 60] == value).all()
        caption = pixels[MARGIN + 40 :, left : left + 60].reshape(-1, 3)
        assert (caption == INK).all(axis=1).any(), "there is text below every picture"
    assert (pixels[:MARGIN] == PAPER).all()
