"""The demo's mask: an outline drawn by hand around the astronaut's helmet, as a user would paint it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from PIL import Image, ImageDraw

Point: TypeAlias = tuple[float, float]
"""(x, y) as fractions of width and height."""

HELMET: Final[tuple[Point, ...]] = (
    (0.566, 0.830), (0.600, 0.762), (0.660, 0.706), (0.738, 0.680), (0.826, 0.686),
    (0.896, 0.722), (0.948, 0.790), (0.966, 0.868), (0.950, 0.938), (0.902, 0.990),
    (0.830, 1.015), (0.730, 1.020), (0.640, 1.002), (0.578, 0.930),
)  # fmt: skip
"""Around the visor of the helmet in the photograph that scikit-image ships."""


def paint(width: int, height: int, outline: Sequence[Point] = HELMET) -> Image.Image:
    """The mask: white where to edit, black elsewhere, mode L."""
    mask = Image.new("L", (width, height), 0)
    ImageDraw.Draw(mask).polygon([(x * width, y * height) for x, y in smooth(outline)], fill=255)
    return mask


def smooth(points: Sequence[Point], per_segment: int = 12) -> list[Point]:
    """The closed uniform Catmull-Rom spline through `points`, `per_segment` samples between two of them."""
    n = len(points)
    quadruples = [[points[(i + k) % n] for k in (-1, 0, 1, 2)] for i in range(n)]
    return [_catmull_rom(quadruple, j / per_segment) for quadruple in quadruples for j in range(per_segment)]


def _catmull_rom(points: Sequence[Point], t: float) -> Point:
    """Between the second and third of four points, `t` in 0..1."""
    weights = (
        (-t + 2 * t**2 - t**3) / 2,
        (2 - 5 * t**2 + 3 * t**3) / 2,
        (t + 4 * t**2 - 3 * t**3) / 2,
        (t**3 - t**2) / 2,
    )
    x, y = (
        sum(weight * point[axis] for weight, point in zip(weights, points, strict=True)) for axis in (0, 1)
    )
    return x, y
