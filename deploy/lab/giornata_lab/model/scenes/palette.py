"""The twelve colours that captions name, and which grounds let them be seen."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

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
