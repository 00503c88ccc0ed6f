"""The effective alpha as bytes. The inspection computes it once; the finishing of every row reads it."""

from __future__ import annotations

import zlib
from typing import Final

import numpy as np
from safetensors.numpy import load, save

from giornata_prepost.images.geometry import Box
from giornata_prepost.images.masks import Alpha, bounds

LEVEL: Final = 1
"""Level of zlib. An alpha is 0 or 1 nearly everywhere and shrinks more than thirtyfold at any level."""


def pack(alpha: Alpha) -> bytes:
    """`alpha` (height, width) without loss: the part that is above 0, compressed."""
    box = bounds(alpha > 0, 0) if alpha.any() else Box(0, 0, 0, 0)
    place = np.array([*alpha.shape, *box], np.int64)
    return zlib.compress(save({"place": place, "alpha": np.ascontiguousarray(alpha[box.window])}), LEVEL)


def unpack(data: bytes) -> Alpha:
    """What :func:`pack` was given."""
    tensors = load(zlib.decompress(data))
    height, width, *box = tensors["place"].tolist()
    alpha = np.zeros((height, width), np.float32)
    alpha[Box(*box).window] = tensors["alpha"]
    return alpha
