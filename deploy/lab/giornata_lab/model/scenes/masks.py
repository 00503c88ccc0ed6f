"""Masks as people and programs draw them: boxes, ellipses, brush strokes, the shape of a thing."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

Mask = NDArray[np.bool_]
"""(side, side); True is repainted."""

RATIO_QUANTILES: Final = (
    0.0157, 0.0484, 0.0612, 0.0722, 0.0822, 0.0952, 0.1103, 0.1278, 0.1545, 0.2082, 0.4209,
)  # fmt: skip
"""Deciles of the ratio of masked to all pixels in production (FlashPS, EuroSys '26, figure 2's templates)."""


def ratio(rng: np.random.Generator) -> float:
    """A ratio drawn from the production quantiles."""
    return float(np.interp(rng.uniform(), np.linspace(0, 1, len(RATIO_QUANTILES)), RATIO_QUANTILES))


def box(side: int, x: float, y: float, half_width: float, half_height: float) -> Mask:
    """A rectangle about (x, y), in pixels, cut off at the canvas."""
    g = np.arange(side) + 0.5
    mask: Mask = (np.abs(g - y) < half_height)[:, None] & (np.abs(g - x) < half_width)[None]
    return mask


def ellipse(side: int, x: float, y: float, half_width: float, half_height: float) -> Mask:
    """An ellipse about (x, y), in pixels."""
    g = np.arange(side) + 0.5
    mask: Mask = (((g - y) / half_height) ** 2)[:, None] + (((g - x) / half_width) ** 2)[None] < 1
    return mask


def brush(rng: np.random.Generator, side: int, x: float, y: float, half: float) -> Mask:
    """Scribbled strokes of a round brush that together cover the disc of radius 0.8 `half` about (x, y)."""
    canvas = Image.new("1", (side, side))
    draw = ImageDraw.Draw(canvas)
    width = half * rng.uniform(0.7, 0.95)
    heights = np.linspace(-1, 1, 4) * (half - width / 2) + rng.normal(0, 0.04 * half, 4)
    points = []
    for i, dy in enumerate(heights):
        reach = np.sqrt(max((0.95 * half) ** 2 - dy**2, 0.0)) * rng.uniform(0.8, 1.1)
        ends = [(x - reach, y + dy), (x + reach, y + dy + rng.normal(0, 0.05 * half))]
        points += ends if i % 2 == 0 else ends[::-1]
    draw.line([(float(u), float(v)) for u, v in points], fill=1, width=max(round(width), 1), joint="curve")
    for u, v in points:
        draw.ellipse((u - width / 2, v - width / 2, u + width / 2, v + width / 2), fill=1)
    return np.asarray(canvas, bool)


def image(mask: NDArray[np.bool_]) -> Image.Image:
    """(height, width) as files and requests hold it: mode L, white is repainted."""
    return Image.fromarray(mask.astype(np.uint8) * np.uint8(255))


def around(alpha: NDArray[np.float32], left: int, top: int, side: int, margin: int) -> Mask:
    """Every pixel within `margin` (a square's half side) of a thing's coverage."""
    mask = np.zeros((side, side), bool)
    mask[top : top + alpha.shape[0], left : left + alpha.shape[1]] = alpha > 0
    grown = Image.fromarray(mask.astype(np.uint8)).filter(ImageFilter.MaxFilter(2 * margin + 1))
    return np.asarray(grown, bool)


def overlap(one: Mask, other: Mask) -> float:
    """Intersection over union of two masks of one shape; 1 where both are empty."""
    union = int((one | other).sum())
    return float((one & other).sum() / union) if union else 1.0
