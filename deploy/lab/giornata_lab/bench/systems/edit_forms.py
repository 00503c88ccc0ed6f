"""Pictures for the end-to-end tests, and the OpenAI-style form."""

from __future__ import annotations

import io
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]


def scene(width: int = 128, height: int = 96, seed: int = 0, channels: int = 3) -> Pixels:
    """A smooth random picture, (height, width, channels) uint8."""
    noise = np.random.default_rng(seed).integers(0, 256, (6, 8, channels), dtype=np.uint8)
    bands = [
        Image.fromarray(noise[..., i]).resize((width, height), Image.Resampling.BICUBIC)
        for i in range(channels)
    ]
    return np.stack([np.asarray(band) for band in bands], axis=-1)


def box(width: int = 128, height: int = 96) -> Pixels:
    """A mask, (height, width) uint8: white in the middle quarter."""
    mask = np.zeros((height, width), np.uint8)
    mask[height // 4 : height // 2, width // 4 : width // 2] = 255
    return mask


def file(pixels: Pixels, form: str = "PNG", **options: Any) -> bytes:
    """`pixels` as an image file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form, **options)
    return buffer.getvalue()


def pixels(data: bytes) -> Pixels:
    """An image file as (height, width[, channels]) uint8."""
    return np.asarray(Image.open(io.BytesIO(data)))


def edit_form(image: bytes | None = None, mask: bytes | None = None, **fields: object) -> aiohttp.FormData:
    """A multipart request with defaults that are quick on the small model."""
    form = aiohttp.FormData()
    form.add_field(
        "image", image if image is not None else file(scene()), filename="image.png", content_type="image/png"
    )
    form.add_field(
        "mask", mask if mask is not None else file(box()), filename="mask.png", content_type="image/png"
    )
    for name, value in {"prompt": "a red hat", "num_inference_steps": 4, "seed": 7, **fields}.items():
        form.add_field(name, str(value).lower() if isinstance(value, bool) else str(value))
    return form
