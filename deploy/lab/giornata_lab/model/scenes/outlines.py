"""The eight shapes that captions name, as polygons in units of the radius; y points down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import ceil, cos, floor, pi, radians, sin
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Polygon = NDArray[np.float64]
"""(corners, 2) x, y."""
OVERSAMPLING: Final = 4
"""Coverage is counted on a grid this many times finer than the pixels."""
RING_HOLE: Final = 0.55
"""Radius of a ring's hole."""


@dataclass(frozen=True)
class Outline:
    """A filled polygon, perhaps with a hole."""

    rim: Polygon
    hole: Polygon | None = None


def _regular(corners: int, first_deg: float, radius: float = 1.0) -> Polygon:
    angles = np.deg2rad(first_deg + 360 * np.arange(corners) / corners)
    return radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)


def _star() -> Outline:
    tips, dents = _regular(5, -90), _regular(5, -54, 0.45)
    return Outline(np.stack([tips, dents], axis=1).reshape(-1, 2) + np.asarray((0, 0.05)))


def _heart() -> Outline:
    t = np.linspace(0, 2 * pi, 49)[:-1]
    x = 16 * np.sin(t) ** 3
    y = -(13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t))
    return Outline(np.stack([x, y - 2.5], axis=1) / 16)


def _cross() -> Outline:
    arm, half = 0.96, 0.32
    corners = [(-half, -arm), (half, -arm), (half, -half), (arm, -half), (arm, half), (half, half)]
    return Outline(np.asarray(corners + [(-x, -y) for x, y in corners]))


OUTLINES: Final[dict[str, Callable[[], Outline]]] = {
    "circle": lambda: Outline(_regular(48, 0)),
    "square": lambda: Outline(_regular(4, 45, 1.22)),
    "triangle": lambda: Outline(_regular(3, -90, 1.15) + np.asarray((0, 0.25))),
    "star": _star,
    "heart": _heart,
    "ring": lambda: Outline(_regular(48, 0), _regular(48, 0, RING_HOLE)),
    "diamond": lambda: Outline(np.asarray([(0, -1.05), (0.72, 0), (0, 1.05), (-0.72, 0)])),
    "cross": _cross,
}
SHAPES: Final = tuple(OUTLINES)


@cache
def outline(shape: str) -> Outline:
    """The outline of `shape`, built once."""
    return OUTLINES[shape]()


@dataclass(frozen=True)
class Coverage:
    """How much of each pixel of a box a shape covers."""

    left: int
    top: int
    alpha: NDArray[np.float32]
    """(height, width) in [0, 1]."""


@dataclass(frozen=True)
class SceneShape:
    """A coloured shape; x, y and radius in pixels."""

    shape: str
    colour: str
    x: float
    y: float
    radius: float
    angle_deg: float


def coverage(thing: SceneShape, side: int) -> Coverage:
    """What `thing` covers of a canvas of `side` pixels; empty where it lies outside."""
    x, y, radius = thing.x, thing.y, thing.radius
    left, top = max(floor(x - 1.3 * radius) - 1, 0), max(floor(y - 1.3 * radius) - 1, 0)
    right, bottom = min(ceil(x + 1.3 * radius) + 1, side), min(ceil(y + 1.3 * radius) + 1, side)
    if right <= left or bottom <= top:
        return Coverage(0, 0, np.zeros((0, 0), np.float32))
    fine = Image.new("L", ((right - left) * OVERSAMPLING, (bottom - top) * OVERSAMPLING))
    draw = ImageDraw.Draw(fine)
    a = radians(thing.angle_deg)
    turn = np.asarray([[cos(a), sin(a)], [-sin(a), cos(a)]])
    parts = outline(thing.shape)
    for polygon, fill in ((parts.rim, 255), (parts.hole, 0)):
        if polygon is not None:
            corners = (polygon @ turn * radius + (x - left, y - top)) * OVERSAMPLING - 0.5
            draw.polygon([(float(u), float(v)) for u, v in corners], fill=fill)
    return Coverage(left, top, (np.asarray(fine.reduce(OVERSAMPLING)) / 255).astype(np.float32))
