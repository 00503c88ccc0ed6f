"""Colours, shapes, backgrounds and masks of procedural scenes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import ceil, cos, floor, pi, radians, sin
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

RGB = NDArray[np.float32]
"""(3,) red, green, blue in [0, 1]."""

COLOURS: Final[dict[str, tuple[int, int, int]]] = {
    "red": (220, 40, 45),
    "orange": (242, 140, 30),
    "yellow": (247, 215, 50),
    "green": (55, 165, 75),
    "teal": (35, 165, 170),
    "blue": (45, 95, 220),
    "purple": (140, 65, 190),
    "pink": (240, 130, 180),
    "brown": (125, 80, 45),
    "white": (246, 246, 246),
    "black": (24, 24, 28),
    "gray": (140, 140, 145),
}
"""Name → 8-bit sRGB."""

CONTRAST: Final = 0.30
"""Least Euclidean distance, in [0, 1] RGB, between a ground's colours and a thing that lies on it."""
CHANNEL_MIN: Final = 0.12
CHANNEL_MAX: Final = 0.96


def rgb(name: str) -> RGB:
    """The colour `name` in [0, 1]."""
    return (np.asarray(COLOURS[name]) / 255).astype(np.float32)


def ground_colour(
    rng: np.random.Generator, avoid: list[RGB], start: RGB | None = None, part: float = 1.0
) -> RGB:
    """A random colour at least `CONTRAST` away from every colour of `avoid`; the farthest of 64 where none is.

    Args:
        rng: decides.
        avoid: colours of the things on the ground.
        start: the colour lies on the way from this one to a random one.
        part: of that way.
    """
    candidates: NDArray[np.float32] = rng.uniform(CHANNEL_MIN, CHANNEL_MAX, (64, 3)).astype(np.float32)
    if start is not None:
        candidates = (start + part * (candidates - start)).astype(np.float32)
    if not avoid:
        first: RGB = candidates[0]
        return first
    distances = np.linalg.norm(candidates[:, None] - np.stack(avoid)[None], axis=2).min(1)
    good = np.flatnonzero(distances >= CONTRAST)
    chosen: RGB = candidates[good[0] if len(good) else int(distances.argmax())]
    return chosen


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
    """Return what `thing` covers of a canvas of `side` pixels; empty where it lies outside."""
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


Picture = NDArray[np.float32]
"""(side, side, 3) in [0, 1]."""
NEARNESS: Final[dict[str, tuple[float, float]]] = {
    "stripes": (0.25, 0.65),
    "checks": (0.25, 0.65),
    "blobs": (0.4, 0.7),
}
"""How far the second colour lies from the first, as a part of the way to a random one; all of it for other kinds."""
NOISE_AMPLITUDE: Final = 0.035
"""Mean standard deviation of an octave of soft noise, in [0, 1]."""
NOISE_OCTAVES: Final = ((48, 1.0), (16, 0.6), (5, 0.35))
"""Size of a cell in pixels, and strength."""


def _axis(rng: np.random.Generator, side: int) -> NDArray[np.float32]:
    """Coordinate along a random direction, in pixels; (side, side)."""
    angle = rng.uniform(0, np.pi)
    g = np.arange(side, dtype=np.float32)
    along: NDArray[np.float32] = (g[None] * np.cos(angle) + g[:, None] * np.sin(angle)).astype(np.float32)
    return along


def _mix(a: RGB, b: RGB, weight: NDArray[np.float32]) -> Picture:
    mixed: Picture = (a + (b - a) * weight[..., None]).astype(np.float32)
    return mixed


def _flat(_rng: np.random.Generator, side: int, a: RGB, _b: RGB) -> Picture:
    return np.broadcast_to(a, (side, side, 3)).copy()


def _gradient(rng: np.random.Generator, side: int, a: RGB, b: RGB) -> Picture:
    u = _axis(rng, side)
    return _mix(a, b, (u - u.min()) / np.ptp(u))


def _stripes(rng: np.random.Generator, side: int, a: RGB, b: RGB) -> Picture:
    period = rng.uniform(10, 36)
    wave = np.sin(2 * np.pi * _axis(rng, side) / period + rng.uniform(0, 2 * np.pi))
    return _mix(a, b, 1 / (1 + np.exp(-6 * wave)))


def _checks(rng: np.random.Generator, side: int, a: RGB, b: RGB) -> Picture:
    cell, shift = rng.uniform(10, 28), rng.uniform(0, 64, 2)
    g = np.arange(side)
    rows, columns = np.floor((g + shift[0]) / cell), np.floor((g + shift[1]) / cell)
    odd = ((rows[:, None] + columns[None]) % 2).astype(np.float32)
    return _mix(a, b, odd)


def _noise(rng: np.random.Generator, side: int, a: RGB, b: RGB) -> Picture:
    """Octaves of soft noise, coarse ones stronger, in brightness and (less) in colour: the nearest to a photograph."""
    picture = _flat(rng, side, a, b)
    strength = NOISE_AMPLITUDE * rng.uniform(0.4, 1.6)
    for cell_px, share in NOISE_OCTAVES:
        cells = max(round(side / cell_px), 2)
        grey = _enlarge(rng.standard_normal((cells, cells)).astype(np.float32), side)[..., None]
        tint = rng.uniform(0.6, 1.4, 3).astype(np.float32)
        picture += strength * share * grey * tint
    return picture


def _blobs(rng: np.random.Generator, side: int, a: RGB, b: RGB) -> Picture:
    cells = int(rng.integers(3, 6))
    weight = _enlarge(rng.uniform(0, 1, (cells, cells)).astype(np.float32), side)
    return _mix(a, b, weight.clip(0, 1))


def _enlarge(grid: NDArray[np.float32], side: int) -> NDArray[np.float32]:
    return np.asarray(Image.fromarray(grid).resize((side, side), Image.Resampling.BICUBIC), np.float32)


GROUNDS: Final[dict[str, Callable[[np.random.Generator, int, RGB, RGB], Picture]]] = {
    "flat": _flat,
    "gradient": _gradient,
    "stripes": _stripes,
    "checks": _checks,
    "noise": _noise,
    "blobs": _blobs,
}
"""Kind → painter of (generator, side in pixels, two colours)."""


def ground(rng: np.random.Generator, kind: str, side: int, avoid: list[RGB]) -> Picture:
    """A background of `kind` whose colours keep away from those in `avoid`."""
    a = ground_colour(rng, avoid)
    b = ground_colour(rng, avoid, a, rng.uniform(*NEARNESS.get(kind, (1.0, 1.0))))
    return GROUNDS[kind](rng, side, a, b).clip(0, 1)


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
