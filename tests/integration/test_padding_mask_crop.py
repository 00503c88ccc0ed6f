"""An edit with `padding_mask_crop` equals that of diffusers' own pipeline, from the files to the finished picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from diffusers import FluxInpaintPipeline
from PIL import Image

from giornata.families import Family
from giornata.wire.models import ModelCard
from giornata.wire.requests import EditParameters
from giornata.wire.resolution import resolve
from giornata_lab.baseline.pipeline import opened
from giornata_prepost.images import pictures
from giornata_prepost.images.pictures import Box, Pixels, Size
from giornata_prepost.images.stages import PixelLimits, finish, inspect
from tests.integration.painting import Served, final_latent, served
from tests.integration.prepost.asking import png

NATIVE = 64
LIMITS = PixelLimits(max_pixels=1 << 20, budget_pixels=1 << 20)
SEED = 5


@pytest.fixture(scope="module")
def of(tiny_checkpoint: Callable[[Family], Path]) -> Served:
    return served(tiny_checkpoint(Family.FLUX_INPAINT))


@pytest.fixture(scope="module")
def pipeline(tiny_checkpoint: Callable[[Family], Path]) -> Any:
    return opened(FluxInpaintPipeline, tiny_checkpoint(Family.FLUX_INPAINT))


def ours(of: Served, card: ModelCard, image: bytes, mask: bytes, parameters: EditParameters) -> Pixels:
    """The edit by the services' own functions, in the order of a job."""
    found = inspect(image, mask, parameters, card, LIMITS)
    prepared = safetensors.numpy.load(found.prepared)
    latent = final_latent(of, of.edited("job", parameters, prepared["image"], prepared["mask"]))
    painted = of.images.decode(latent, Size(found.measures.model_width, found.measures.model_height))
    finished = finish(image, found.alpha, parameters, LIMITS, painted, found.measures.crop)
    return pictures.decode(finished, 1 << 20).pixels


@pytest.mark.parametrize(
    ("marked", "padding", "crop"),
    [
        (Box(80, 60, 16, 16), 8, Box(72, 52, 32, 32)),  # scaled up twice
        (Box(80, 60, 16, 8), 8, Box(72, 48, 32, 32)),  # made square
        (Box(0, 80, 32, 32), 48, Box(0, 32, 128, 128)),  # scaled down, moved in from two borders
    ],
    ids=str,
)
def test_a_crop_equals_diffusers_own(of: Served, pipeline: Any, marked: Box, padding: int, crop: Box) -> None:
    scene = np.random.default_rng(1).integers(0, 256, (160, 200, 3), np.uint8)
    mask = np.zeros((160, 200), np.uint8)
    mask[marked.window] = 255
    told: dict[str, Any] = {
        "prompt": "a hat",
        "num_inference_steps": 3,
        "strength": 1.0,
        "guidance_scale": 4.0,
        "padding_mask_crop": padding,
    }
    card = of.card.model_copy(update={"native_size": NATIVE})
    parameters = resolve(EditParameters(**told, mask_blur=0), card, SEED)
    assert inspect(png(scene), png(mask), parameters, card, LIMITS).measures.crop == crop
    mine = ours(of, card, png(scene), png(mask), parameters)
    theirs = pipeline(
        **told,
        image=Image.fromarray(scene),
        mask_image=Image.fromarray(mask),
        width=NATIVE,
        height=NATIVE,
        max_sequence_length=card.max_text_tokens,
        generator=torch.Generator().manual_seed(SEED),
    ).images[0]
    assert np.abs(mine.astype(int) - np.asarray(theirs)).max() <= 1
    inside = mask > 0
    np.testing.assert_array_equal(mine[~inside], scene[~inside])
    assert np.abs(mine.astype(int) - scene)[inside].mean() > 5, "it is painted"
