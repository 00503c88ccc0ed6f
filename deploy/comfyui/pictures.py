"""Between ComfyUI's tensors and image files.

ComfyUI's IMAGE is (pictures, height, width, channels) float32 in 0 to 1; its MASK (pictures, height, width) float32, 1
where something is masked.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image


def files_of(images: torch.Tensor) -> list[bytes]:
    """Every picture of an IMAGE as a PNG file."""
    if images.ndim != 4 or images.shape[3] not in {3, 4}:
        raise ValueError(
            f"image: (pictures, height, width, 3 or 4) is needed, received {tuple(images.shape)}"
        )
    return [_png(picture) for picture in images]


def masks_of(masks: torch.Tensor, pictures: int) -> list[bytes]:
    """A mask for each of so many `pictures`, white where it is masked, as a PNG file. One mask may serve them all."""
    stacked = masks[None] if masks.ndim == 2 else masks
    if stacked.ndim != 3 or len(stacked) not in {1, pictures}:
        raise ValueError(
            f"mask: (height, width), or one or {pictures} of them, is needed, received {tuple(masks.shape)}"
        )
    if any(not mask.any() for mask in stacked):
        raise ValueError(
            "mask: nothing is marked. Paint on it, or connect another one: 1 is repainted. ComfyUI hands out an empty "
            "mask where a picture has no transparent pixels."
        )
    files = [_png(mask) for mask in stacked]
    return files * pictures if len(files) == 1 else files


def images_of(files: Sequence[bytes]) -> torch.Tensor:
    """Pictures of one size as an IMAGE."""
    return torch.stack([_tensor(file) for file in files])


def _png(picture: torch.Tensor) -> bytes:
    """(height, width) or (height, width, channels) in 0 to 1."""
    levels = picture.detach().to("cpu", torch.float32).clamp(0, 1).mul(255).round().to(torch.uint8)
    buffer = io.BytesIO()
    Image.fromarray(levels.numpy()).save(buffer, "PNG")
    return buffer.getvalue()


def _tensor(file: bytes) -> torch.Tensor:
    with Image.open(io.BytesIO(file)) as image:
        levels = np.array(image.convert("RGBA" if image.mode == "RGBA" else "RGB"), dtype=np.float32)
    return torch.from_numpy(levels / np.float32(255))
