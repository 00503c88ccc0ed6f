"""Backgrounds: flat, gradient, stripes, checks, soft noise and blurred blobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from giornata_lab.model.scenes.palette import RGB, ground_colour

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
