"""A UNet checkpoint through every service: what it paints equals diffusers' pipelines, also under a ControlNet."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np
import pytest
import torch
from diffusers import (
    ControlNetModel,
    EulerAncestralDiscreteScheduler,
    StableDiffusionControlNetInpaintPipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from PIL import Image

import giornata.client
from giornata.families import Family
from giornata.wire.workers import ServiceName
from giornata_lab.baseline.pipeline import opened
from giornata_lab.bench.systems.edit_forms import Pixels, box, edit_form, file, pixels, scene
from giornata_tools.checkout import MODELS
from giornata_tools.launcher.models import choose
from tests.e2e.live import LiveStack, live_stack
from tests.fakes import tiny_unet_control

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
def edges(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random ControlNet for the checkpoint."""
    folder = tmp_path_factory.mktemp("controlnets") / "edges"
    config = UNet2DConditionModel.load_config(checkpoint, subfolder="unet")
    tiny_unet_control.beside(config, controlnet_conditioning_channel_order="bgr").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def painters(checkpoint: Path, edges: Path) -> Iterator[LiveStack]:
    env = {ServiceName.DENOISER: {"GIORNATA_CONTROLNETS": str(edges)}}
    with live_stack(checkpoint, env_of=env) as live:
        yield live


def expected(kind: Any, checkpoint: Path, controlnet: ControlNetModel | None = None, **shown: Any) -> Pixels:
    """What a pipeline makes of the same."""
    pipeline = opened(kind, checkpoint, **({} if controlnet is None else {"controlnet": controlnet}))
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


@pytest.mark.long
async def test_an_edit_under_a_controlnet_equals_the_pipeline(
    painters: LiveStack, checkpoint: Path, edges: Path
) -> None:
    image, mask, seen = scene(**SIDES), box(**SIDES), scene(**SIDES, seed=5)
    asked = {"controlnets": json.dumps([{"model": "edges", "image": 0, "scale": 0.8}])}
    form = edit_form(file(image), file(mask), **ASKED, **asked, mask_blur=0, reuse="off")
    form.add_field("control_image_0", file(seen), filename="seen.png", content_type="image/png")
    made: dict[str, Any] = {
        **ASKED,
        "size": "128x64",
        "control_image_0": base64.b64encode(file(seen)).decode(),
    }
    made["controlnets"] = [{"model": "edges", "image": 0, "scale": 0.8}]
    async with aiohttp.ClientSession(painters.url) as http:
        async with http.get("/v1/models") as answer:
            (told,) = (await answer.json())["data"]
        edited, _ = await answered(http, "/v1/images/edits", data=form)
        drawn, _ = await answered(http, "/v1/images/generations", json=made)
    assert told["controlnets"] == [{"name": "edges", "modes": 0}]
    async with giornata.client.connect(painters.nats_url) as client:
        given: dict[str, Any] = {"mask_blur": 0, "reuse": "off", "controlnets": made["controlnets"]}
        pictures: dict[str, Any] = {"image": file(image), "mask": file(mask), "control_image": [file(seen)]}
        result = await (await client.edit(**pictures, **ASKED, **given))
    assert np.array_equal(pixels(result.pictures[0].data), edited)
    net = ControlNetModel.from_pretrained(edges)
    how = {"controlnet_conditioning_scale": 0.8}
    shown = {"image": Image.fromarray(image), "mask_image": Image.fromarray(mask)}
    control = Image.fromarray(seen)
    inside = mask > 0
    wanted = expected(
        StableDiffusionControlNetInpaintPipeline, checkpoint, net, **shown, **how, control_image=control
    )
    assert difference(edited[inside], wanted[inside]) <= 1
    plain = expected(StableDiffusionInpaintPipeline, checkpoint, **shown)
    assert difference(edited[inside], plain[inside]) > 8, "the ControlNet is seen"
    assert (
        difference(drawn, expected(StableDiffusionControlNetPipeline, checkpoint, net, **how, image=control))
        <= 1
    )


@pytest.mark.long
async def test_an_edit_may_ask_for_reuse(painters: LiveStack) -> None:
    image, mask = scene(**SIDES), box(**SIDES)
    form = edit_form(file(image), file(mask), **ASKED, mask_blur=0, reuse="strict")
    controls = json.dumps([{"model": "edges", "annotator": "canny"}])
    under = edit_form(file(image), file(mask), **ASKED, mask_blur=0, reuse="strict", controlnets=controls)
    async with aiohttp.ClientSession(painters.url) as http:
        edited, told = await answered(http, "/v1/images/edits", data=form)
        controlled, shown = await answered(http, "/v1/images/edits", data=under)
    assert shown["template"] == told["template"]
    assert difference(controlled, edited) > 8, "the ControlNet is seen"
    assert told["template"] != ["off"]
    inside = mask > 0
    assert np.array_equal(edited[~inside], image[~inside])
    assert difference(edited[inside], image[inside]) > 5
