"""Templates: generated pictures, and the sizes of given ones. Pure."""

from __future__ import annotations

import io
from typing import Final

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

SUFFIXES: Final = (".png", ".jpg", ".jpeg", ".webp")
"""Endings of pictures in a folder."""
WAVES: Final = 6
"""How many waves a generated picture is made of."""


def generated(width: int, height: int, seed: int) -> bytes:
    """A PNG of `width` x `height` pixels: soft waves of colour, others for every `seed`."""
    chance = np.random.default_rng(seed)
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    planes = []
    for _ in range(3):
        plane = np.zeros((height, width))
        for _ in range(WAVES):
            across, down, phase = chance.uniform(-4, 4), chance.uniform(-4, 4), chance.uniform(0, 2 * np.pi)
            plane += np.cos(2 * np.pi * (across * x + down * y) + phase)
        planes.append(127.5 + plane * (127.5 / WAVES))
    return png(Image.fromarray(np.stack(planes, -1).round().astype(np.uint8)), compress_level=1)


def png(picture: Image.Image, **settings: int) -> bytes:
    """A PNG file; `settings` are Pillow's."""
    file = io.BytesIO()
    picture.save(file, "PNG", **settings)
    return file.getvalue()


def upright_size(file: bytes) -> tuple[int, int]:
    """(width, height) in pixels of an encoded picture, as its EXIF orientation shows it.

    Raises:
        ValueError: it is no picture.
    """
    try:
        with Image.open(io.BytesIO(file)) as picture:
            return ImageOps.exif_transpose(picture).size
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"it is no picture that can be read: {error}") from error
