"""The picture, mask and prompt that tests edit with, and what their comparisons change of diffusers' pipelines."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from giornata_prepost.images.pictures import Pixels, Size

SIZE = Size(128, 64)
PROMPT, NEGATIVE = "a red hat on the dog", "blurry"


def picture(size: Size = SIZE) -> Pixels:
    return np.random.default_rng(1).integers(0, 256, (size.height, size.width, 3), np.uint8)


def mask(size: Size = SIZE) -> npt.NDArray[np.uint8]:
    """Neither symmetric nor aligned to latent pixels or tokens."""
    marked = np.zeros((size.height, size.width), np.uint8)
    marked[5:30, 10:71] = 255
    marked[40:45, 90:] = 255
    return marked


def mask_padding(pipeline: Any) -> None:
    """Have a pipeline of Chroma mask padding; its own mask is numbers, which only dim it (diffusers #12116)."""
    prepare = pipeline._prepare_attention_mask

    def masked(*args: Any, **kwargs: Any) -> Any:
        made = prepare(*args, **kwargs)
        return None if made is None else made > 0

    pipeline._prepare_attention_mask = masked
