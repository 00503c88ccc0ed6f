"""Masks of a given ratio at random places, as the files that servers take. Pure."""

from __future__ import annotations

from math import ceil, floor, pi
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from giornata_tools.loadgen.pictures import png
from giornata_tools.loadgen.workload import MaskShape

Mask = NDArray[np.bool_]
"""(height, width); True is repainted."""
Distances = NDArray[np.floating[Any]]
"""(height, width), or what broadcasts to it: how far pixels are from a mask's centre."""

WAVES: Final = (2, 3, 5)
"""How many waves run around a blob's rim."""
DEPTH: Final = 0.12
"""Height of a wave as a share of the radius."""
MARGIN: Final = 2
"""Pixels around a patch's box: where it is small, the pixels nearest to its centre may lie beside it."""


def mask(width: int, height: int, ratio: float, shape: MaskShape, seed: int) -> Mask:
    """A connected patch of round(`ratio` x pixels) pixels, one at least: the ones nearest to its centre.

    It lies inside of the picture where it fits, and fills what there is where it does not.

    Args:
        width: of the picture, in pixels.
        height: of the picture, in pixels.
        ratio: of masked to all pixels, 0..1.
        shape: of the patch.
        seed: of its place, and of a blob's rim.
    """
    chance = np.random.default_rng(seed)
    count = min(max(1, round(ratio * width * height)), width * height)
    half = count**0.5 / 2 if shape is MaskShape.SQUARE else (count / pi) ** 0.5 * (1 + DEPTH * len(WAVES))
    across, down = (_centre(side, half, chance) for side in (width, height))
    fits = 2 * half <= min(width, height)
    columns, rows = (
        _around(centre, half if fits else side, side) for centre, side in ((across, width), (down, height))
    )
    x = np.arange(columns.start, columns.stop, dtype=np.float32)[None] + np.float32(0.5 - across)
    y = np.arange(rows.start, rows.stop, dtype=np.float32)[:, None] + np.float32(0.5 - down)
    far = np.maximum(np.abs(x), np.abs(y)) if shape is MaskShape.SQUARE else _from_rim(x, y, chance)
    part = np.zeros(far.size, np.bool_)
    part[np.argpartition(far.ravel(), count - 1)[:count]] = True
    found = np.zeros((height, width), np.bool_)
    found[rows, columns] = part.reshape(far.shape)
    return found


def mask_file(marked: Mask) -> bytes:
    """`marked` as OpenAI's image API takes it: an RGBA PNG, transparent where the picture is repainted."""
    pixels = np.zeros((*marked.shape, 4), np.uint8)
    pixels[..., 3] = np.where(marked, np.uint8(0), np.uint8(255))
    return png(Image.fromarray(pixels), compress_level=1)


def _from_rim(x: Distances, y: Distances, chance: np.random.Generator) -> Distances:
    """Distance from (0, 0) over that of a rim, a circle with waves of random phases."""
    angle = np.arctan2(y, x)
    rim = np.ones_like(angle)
    for wave in WAVES:
        rim += np.float32(DEPTH) * np.sin(np.float32(wave) * angle + np.float32(chance.uniform(0, 2 * pi)))
    far: Distances = np.hypot(x, y) / rim
    return far


def _centre(side: int, half: float, chance: np.random.Generator) -> float:
    """Where on a side the patch's centre lies."""
    room = side - 2 * half
    return float(half + room * chance.random()) if room > 0 else side / 2


def _around(centre: float, half: float, side: int) -> slice:
    """The pixels of a side that a patch may touch."""
    return slice(max(0, floor(centre - half) - MARGIN), min(side, ceil(centre + half) + MARGIN))
