"""The baseline server paints with diffusers' own pipelines, of families that are served and of others."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from giornata.families import Family
from giornata.model_cards import read_model_card
from giornata_lab.baseline.pipeline import PIPELINES, Pipeline, opened
from giornata_lab.baseline.server import BatchPolicy
from giornata_tools.checkout import TRAINED
from tests.lab.baseline.served import FOREVER_S, MASKS, PICTURES, SIZE, edited, pixels, served


@pytest.mark.parametrize("family", list(PIPELINES))
async def test_a_batch_is_the_pipelines_own(
    family: Family, tiny_checkpoint: Callable[[Family], Path]
) -> None:
    folder = tiny_checkpoint(family)
    pipeline = Pipeline(str(folder), torch.device("cpu"), torch.float32)
    async with served(pipeline, BatchPolicy(3, FOREVER_S)) as http:
        answers = [
            body
            for _, body in await asyncio.gather(
                *(edited(http, number, num_inference_steps="2", strength="0.8") for number in range(3))
            )
        ]
    assert [body["static_batching"][0]["batch"] for body in answers] == [3, 3, 3]
    own = opened(PIPELINES[family], folder, dtype=torch.float32)
    order = sorted(range(3), key=lambda number: answers[number]["static_batching"][0]["place"])
    expected = own(
        prompt=[f"hat {number}" for number in order],
        image=[Image.open(io.BytesIO(PICTURES[number])) for number in order],
        mask_image=[Image.fromarray(MASKS[number].astype(np.uint8) * np.uint8(255)) for number in order],
        width=SIZE[0],
        height=SIZE[1],
        generator=[torch.Generator().manual_seed(number) for number in order],
        **{**pipeline.defaults, "num_inference_steps": 2, "strength": 0.8},
    ).images
    for number, picture in zip(order, expected, strict=True):
        assert np.array_equal(pixels(answers[number]), np.asarray(picture))


@pytest.mark.parametrize(
    "family",
    [
        Family.FLUX2,
        Family.FLUX2_KLEIN_KV,
        Family.QWEN_IMAGE_21,
        Family.QWEN_IMAGE_EDIT,
        Family.QWEN_IMAGE_EDIT_PLUS,
    ],
)
def test_a_family_that_diffusers_does_not_inpaint_with_is_refused(
    family: Family, tiny_checkpoint: Callable[[Family], Path]
) -> None:
    with pytest.raises(
        ValueError, match=f"has no inpainting pipeline for {family} that takes a size; it has"
    ):
        Pipeline(str(tiny_checkpoint(family)), torch.device("cpu"), torch.float32)


async def test_what_is_not_said_is_as_giornata_serves_the_model() -> None:
    card = read_model_card(TRAINED)
    defaults = Pipeline(str(TRAINED), torch.device("cpu"), torch.float32).defaults
    assert defaults["num_inference_steps"] == card.default_steps
    assert defaults["guidance_scale"] == card.default_guidance_scale
