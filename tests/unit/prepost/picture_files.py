"""Picture files of every kind, and what they are decoded to."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from giornata_prepost.images.pictures import Pixels, decode

LIMIT = 1_000_000
GRADIENT = np.stack(np.meshgrid(np.arange(0, 240, 10), np.arange(0, 160, 10)), axis=-1).astype(np.uint8)
RGB = np.dstack([GRADIENT, np.full(GRADIENT.shape[:2], 77, np.uint8)])
ALPHA = np.linspace(0, 255, RGB.shape[0] * RGB.shape[1]).reshape(RGB.shape[:2]).astype(np.uint8)
RGBA = np.dstack([RGB, ALPHA])


def saved(image: Image.Image | Pixels, form: str, **options: Any) -> bytes:
    target = BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(target, form, **options)
    return target.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def tiff(orientation: int, kind: int = 3, count: int = 1, order: str = "<") -> bytes:
    """An EXIF block whose one entry is an orientation."""
    head = b"II*\0" if order == "<" else b"MM\0*"
    return head + struct.pack(f"{order}IHHHIHHI", 8, 1, 0x0112, kind, count, orientation, 0, 0)


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *extra: bytes) -> bytes:
    """A PNG of any depth and colour type; `rows` without filter bytes."""
    stride = len(rows) // height if height and rows else 0
    raw = b"".join(b"\0" + rows[y * stride : (y + 1) * stride] for y in range(height)) if rows else b""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n"
        + header
        + b"".join(extra)
        + chunk(b"IDAT", zlib.compress(raw))
        + chunk(b"IEND", b"")
    )


def deep_png(samples: np.ndarray[Any, Any], colour: int, *extra: bytes) -> bytes:
    """16 bits a sample, (height, width, channels)."""
    return png(samples.shape[1], samples.shape[0], 16, colour, samples.astype(">u2").tobytes(), *extra)


def pixels(data: bytes) -> Pixels:
    return decode(data, LIMIT).pixels
