"""Two models of two families in one stack: each paints as diffusers' pipelines of it, and has its own workers."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np
import pytest
from PIL import Image

from giornata.families import Family
from giornata.wire.models import Sampler
from giornata.wire.workers import ServiceName
from giornata_lab.bench.systems.edit_forms import Pixels, box, edit_form, file, pixels
from giornata_tools.checkout import MODELS
from giornata_tools.launcher.models import choose
from tests.e2e.jobs import ended, submit, until_step
from tests.e2e.live import LiveStack, live_stack
from tests.integration.conformance.families import Asked, open_family
from tests.integration.prepost.oracle import NEGATIVE, SIZE, picture

pytestmark = pytest.mark.long

UNET, TRANSFORMER = Family.SD.value, Family.SD3.value
"""Names of the two models: a family whose steps take whole pictures, and one whose steps take tokens."""
SAMPLERS: Final = {UNET: Sampler.EULER_ANCESTRAL, TRANSFORMER: None}
MASK: Final = box(SIZE.width, SIZE.height)
"""A mask of whole latent pixels: of others, pipelines ask for the middle alone."""


@pytest.fixture(scope="module")
def checkpoints() -> dict[str, Path]:
    """The built-in checkpoints by the names of their models."""
    families = (Family.SD, Family.SD3)
    return {each.value: Path(asyncio.run(choose({}, each, MODELS, print)).source) for each in families}


@pytest.fixture(scope="module")
def painters(checkpoints: Mapping[str, Path]) -> Iterator[LiveStack]:
    with live_stack(checkpoints) as live:
        yield live


@pytest.fixture
async def http(painters: LiveStack) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(painters.url) as session:
        yield session


def levels(mine: Pixels, theirs: Pixels) -> int:
    """The largest difference."""
    assert mine.shape == theirs.shape
    return int(np.abs(mine.astype(int) - theirs.astype(int)).max())


async def answered(http: aiohttp.ClientSession, path: str, **body: Any) -> tuple[Pixels, dict[str, Any]]:
    """The picture and what is told of it."""
    async with http.post(path, **body) as answer:
        told = await answer.json()
        assert answer.status == 200, told
    return pixels(base64.b64decode(told["data"][0]["b64_json"])), told["giornata"]


async def recorded(http: aiohttp.ClientSession, image: Pixels, model: str) -> None:
    """Register a template of the picture, and wait until it is recorded."""
    form = aiohttp.FormData({"model": model})
    form.add_field("image", file(image), filename="image.png", content_type="image/png")
    async with http.post("/v1/templates", data=form) as answer:
        assert answer.status == 202, await answer.text()
        location = answer.headers["Location"]
    async with http.get(location, params={"wait_ms": 60_000}) as answer:
        assert (await answer.json())["state"] == "ready"


@pytest.mark.parametrize("model", [UNET, TRANSFORMER])
async def test_edits_and_generations_are_those_of_the_pipelines(
    http: aiohttp.ClientSession, checkpoints: Mapping[str, Path], tmp_path: Path, model: str
) -> None:
    of, original, inside = open_family(model, lambda _: checkpoints[model], tmp_path), picture(), MASK > 0
    guidance = {"guidance_scale": 3.0, "negative_prompt": NEGATIVE}
    asked = Asked(guidance, strength=0.8, size=SIZE, sampler=SAMPLERS[model])
    shown: dict[str, Any] = {"image": Image.fromarray(original), "mask_image": Image.fromarray(MASK)}
    fields = asked.fields | {"model": model}
    form = edit_form(file(original), file(MASK), **fields, mask_blur=0, strength=0.8, reuse="off")
    sized = fields | {"size": f"{SIZE.width}x{SIZE.height}"}
    (painted, told), (made, _) = await asyncio.gather(
        answered(http, "/v1/images/edits", data=form),
        answered(http, "/v1/images/generations", json=sized),
    )
    assert told["template"] == ["off"]
    wanted = of.called(of.case.inpaints, asked, **shown).picture
    assert levels(painted[inside], wanted[inside]) <= 1
    assert np.array_equal(painted[~inside], original[~inside])
    assert levels(made, of.generated(asked).picture) <= 1


async def test_an_edit_finds_the_template_that_its_model_has_recorded(http: aiohttp.ClientSession) -> None:
    original, inside = picture(), MASK > 0
    await recorded(http, original, TRANSFORMER)
    form = edit_form(file(original), file(MASK), model=TRANSFORMER, mask_blur=0, num_inference_steps=3)
    taken, told = await answered(http, "/v1/images/edits", data=form)
    assert told["template"] in (["hit"], ["skipped"])  # on a machine that stands still it may gain nothing
    assert np.array_equal(taken[~inside], original[~inside])
    assert taken[inside].std() > 5


async def test_requests_name_the_model_that_they_are_for(http: aiohttp.ClientSession) -> None:
    async with http.get("/v1/models") as answer:
        served = {model["id"]: model["family"] for model in (await answer.json())["data"]}
    assert served == {UNET: Family.SD, TRANSFORMER: Family.SD3}
    async with http.post("/v1/images/edits", data=edit_form()) as answer:
        assert (await answer.json())["error"]["accepted"] == f"{UNET}, {TRANSFORMER}"


async def test_a_job_waits_for_its_models_next_denoiser_while_the_other_model_goes_on(
    painters: LiveStack, http: aiohttp.ClientSession
) -> None:
    job = await submit(http, edit_form(model=TRANSFORMER, num_inference_steps=100, reuse="off"))
    await until_step(http, job, 3)
    async with http.get("/v1/fleet") as response:
        instances = (await response.json())["instances"]
    (leaving,) = (
        each["instance"]
        for each in instances
        if each["service"] == ServiceName.DENOISER and each["models"] == [TRANSFORMER]
    )
    assert await painters.terminate(leaving) == 0
    await answered(http, "/v1/images/edits", data=edit_form(model=UNET, num_inference_steps=2))
    await painters.start(ServiceName.DENOISER, model=TRANSFORMER)
    assert (await ended(http, job))["state"] == "completed"
