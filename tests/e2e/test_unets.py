"""A UNet checkpoint through every service: what it paints equals diffusers' pipelines."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np
import pytest
import torch
from diffusers import (
    EulerAncestralDiscreteScheduler,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
)
from PIL import Image

from giornata.families import Family
from giornata_lab.baseline.pipeline import opened
from giornata_lab.bench.systems.edit_forms import Pixels, box, edit_form, file, pixels, scene
from giornata_tools.checkout import MODELS
from giornata_tools.launcher.models import choose
from tests.e2e.live import LiveStack, live_stack

SIDES: Final = {"width": 128, "height": 64}
"""Multiples of a tile's 64 pixels: nothing is scaled."""
ASKED: Final[dict[str, Any]] = {
    "prompt": "a red barn",
    "negative_prompt": "snow",
    "num_inference_steps": 3,
    "sampler": "euler_ancestral",
    "seed": 7,
}


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    """The built-in checkpoint of the family sd."""
    return Path(asyncio.run(choose({}, Family.SD, MODELS, print)).source)


@pytest.fixture(scope="module")
def painters(checkpoint: Path) -> Iterator[LiveStack]:
    with live_stack(checkpoint) as live:
        yield live


def expected(kind: Any, checkpoint: Path, **shown: Any) -> Pixels:
    """What a pipeline makes of the same."""
    pipeline = opened(kind, checkpoint)
    pipeline.scheduler = EulerAncestralDiscreteScheduler.from_config(pipeline.scheduler.config)
    told = {name: value for name, value in ASKED.items() if name not in {"seed", "sampler"}}
    generator = torch.Generator().manual_seed(ASKED["seed"])
    return np.asarray(pipeline(**told, **SIDES, generator=generator, **shown).images[0])


def difference(found: Pixels, wanted: Pixels) -> int:
    """The largest, in levels of a pixel."""
    assert found.shape == wanted.shape
    return int(np.abs(found.astype(int) - wanted.astype(int)).max())


async def answered(http: aiohttp.ClientSession, path: str, **body: Any) -> tuple[Pixels, dict[str, Any]]:
    async with http.post(path, **body) as answer:
        told = await answer.json()
        assert answer.status == 200, told
    return pixels(base64.b64decode(told["data"][0]["b64_json"])), told["giornata"]


@pytest.mark.long
async def test_an_edit_and_a_generation_equal_the_pipelines(painters: LiveStack, checkpoint: Path) -> None:
    image, mask = scene(**SIDES), box(**SIDES)
    form = edit_form(file(image), file(mask), **ASKED, strength=0.8, mask_blur=0, reuse="off")
    async with aiohttp.ClientSession(painters.url) as http:
        (edited, told), (made, _) = await asyncio.gather(
            answered(http, "/v1/images/edits", data=form),
            answered(http, "/v1/images/generations", json={**ASKED, "size": "128x64"}),
        )
    assert told["template"] == ["off"]
    shown = {"image": Image.fromarray(image), "mask_image": Image.fromarray(mask), "strength": 0.8}
    wanted = expected(StableDiffusionInpaintPipeline, checkpoint, **shown)
    inside = mask > 0
    assert difference(edited[inside], wanted[inside]) <= 1
    assert difference(edited[~inside], image[~inside]) == 0
    assert difference(made, expected(StableDiffusionPipeline, checkpoint)) <= 1
