"""Files of pictures that requests carry. Pure."""

from __future__ import annotations

import io
from typing import Final

from PIL import Image

from giornata.picture_files import picture_parts

SUFFIXES: Final = (".png", ".jpg", ".jpeg", ".webp")
"""Endings of pictures in a folder."""


def png(picture: Image.Image, **settings: int) -> bytes:
    """A PNG file; `settings` are Pillow's."""
    file = io.BytesIO()
    picture.save(file, "PNG", **settings)
    return file.getvalue()


def upright_size(file: bytes) -> tuple[int, int]:
    """(width, height) in pixels of an encoded picture, as it is shown.

    Raises:
        ValueError: it is no picture.
    """
    try:
        parts = picture_parts(file)
        with Image.open(io.BytesIO(parts.file)) as picture:
            return picture.size if parts.orientation <= 4 else picture.size[::-1]
    except (OSError, ValueError) as error:
        raise ValueError(f"it is no picture that can be read: {error}") from error
