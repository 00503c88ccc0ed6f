"""An edit with `padding_mask_crop` equals that of diffusers' own pipeline, from the files to the finished picture."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from diffusers import FluxInpaintPipeline
from PIL import Image

from giornata.families import Family
from giornata.model_cards import read_model_card
from giornata.scheduling.batch import Capacity, RowKey
from giornata.wire.models import ModelCard
from giornata.wire.requests import EditParameters
from giornata.wire.resolution import resolve
from giornata_denoiser.checkpoint import load
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.families.rows import build_row
from giornata_prepost.families.flow_transformers import FluxInpaintImages
from giornata_prepost.images import pictures
from giornata_prepost.images.geometry import Box, Size
from giornata_prepost.images.pictures import Pixels
from giornata_prepost.images.stages import PixelLimits, finish, inspect

NATIVE = 64
LIMITS = PixelLimits(max_pixels=1 << 20, budget_pixels=1 << 20)
CPU = torch.device("cpu")
SEED = 5


def file(pixels: Pixels) -> bytes:
    target = BytesIO()
    Image.fromarray(pixels).save(target, "PNG")
    return target.getvalue()


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Callable[[Family], Path]) -> Path:
    return tiny_checkpoint(Family.FLUX_INPAINT)


@pytest.fixture(scope="module")
def card(folder: Path) -> ModelCard:
    return read_model_card(folder).model_copy(update={"native_size": NATIVE})


def ours(folder: Path, card: ModelCard, image: bytes, mask: bytes, parameters: EditParameters) -> Pixels:
    """The edit by the services' own functions, in the order of a job."""
    found = inspect(image, mask, parameters, card, LIMITS)
    prepost, denoiser = (
        FluxInpaintImages(folder, card, CPU, torch.float32),
        load(folder, dtype=torch.float32, device=CPU),
    )
    prepared = safetensors.numpy.load(found.prepared)
    (row,) = prepost.encode_rows(prepared["image"], prepared["mask"], [SEED])
    ticks = count()
    engine = Engine(denoiser.family, Capacity(1, 1), lambda: float(next(ticks)))
    engine.batch.submit(
        [
            build_row(
                denoiser.family,
                RowKey("job", 1, 0),
                grid=(found.measures.model_height // 16, found.measures.model_width // 16),
                track=denoiser.family.schedule.track(
                    sampler=denoiser.family.schedule.default_sampler,
                    steps=parameters.num_inference_steps or 0,
                    strength=parameters.strength or 0,
                    cells=found.measures.tokens,
                ),
                text=prepost.encode_text(
                    parameters.prompt, Size(found.measures.model_width, found.measures.model_height)
                ),
                conditioning=row,
                guidance_scale=parameters.guidance_scale or 0,
            )
        ]
    )
    latent = None
    while (report := engine.step()) is not None:
        latent = report.advanced[0].latent
    assert latent is not None
    painted = prepost.decode(latent, Size(found.measures.model_width, found.measures.model_height))
    return pictures.decode(
        finish(image, found.alpha, parameters, LIMITS, painted, found.measures.crop), 1 << 20
    ).pixels


@pytest.mark.parametrize(
    ("marked", "padding", "crop"),
    [
        (Box(80, 60, 16, 16), 8, Box(72, 52, 32, 32)),  # scaled up twice
        (Box(80, 60, 16, 8), 8, Box(72, 48, 32, 32)),  # made square
        (Box(0, 80, 32, 32), 48, Box(0, 32, 128, 128)),  # scaled down, moved in from two borders
    ],
    ids=str,
)
def test_a_crop_equals_diffusers_own(
    folder: Path, card: ModelCard, marked: Box, padding: int, crop: Box
) -> None:
    scene = np.random.default_rng(1).integers(0, 256, (160, 200, 3), np.uint8)
    mask = np.zeros((160, 200), np.uint8)
    mask[marked.window] = 255
    asked = EditParameters(
        prompt="a hat",
        num_inference_steps=3,
        strength=1.0,
        guidance_scale=4.0,
        mask_blur=0,
        padding_mask_crop=padding,
    )
    parameters = resolve(asked, card, SEED)
    assert inspect(file(scene), file(mask), parameters, card, LIMITS).measures.crop == crop
    mine = ours(folder, card, file(scene), file(mask), parameters)

    pipeline: Any = FluxInpaintPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)

    def theirs(seed: int) -> Pixels:
        edited = pipeline(
            prompt="a hat",
            image=Image.fromarray(scene),
            mask_image=Image.fromarray(mask),
            width=NATIVE,
            height=NATIVE,
            padding_mask_crop=padding,
            num_inference_steps=3,
            strength=1.0,
            guidance_scale=4.0,
            max_sequence_length=card.max_text_tokens,
            generator=torch.Generator().manual_seed(seed),
        ).images[0]
        return np.asarray(edited)

    difference = np.abs(mine.astype(int) - theirs(SEED))
    assert difference.max() <= 1
    inside = mask > 0
    np.testing.assert_array_equal(mine[~inside], scene[~inside])
    assert np.abs(mine.astype(int) - theirs(SEED + 1))[inside].mean() > 5  # the comparison can fail
