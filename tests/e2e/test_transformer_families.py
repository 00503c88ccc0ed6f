"""A driven family through every service: an edit, one from its template, and a generation, as diffusers makes them."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np
import pytest
from PIL import Image

from giornata.families import Family
from giornata_lab.bench.systems.edit_forms import Pixels, box, edit_form, file, pixels
from giornata_tools.checkout import MODELS
from giornata_tools.launcher.models import choose
from tests.e2e.live import LiveStack, live_stack
from tests.integration.conformance.families import Asked, open_family
from tests.integration.prepost.oracle import NEGATIVE, PROMPT, SIZE, picture

SEED: Final = 7
MASK: Final = box(SIZE.width, SIZE.height)
"""A mask of whole latent pixels: of others, pipelines ask for the middle alone."""
ASKED: Final[dict[str, Any]] = {
    "prompt": PROMPT,
    "negative_prompt": NEGATIVE,
    "seed": SEED,
    "num_inference_steps": 3,
    "guidance_scale": 3.0,
}


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    """The built-in checkpoint of the family sd3."""
    return Path(asyncio.run(choose({}, Family.SD3, MODELS, print)).source)


@pytest.fixture(scope="module")
def painters(checkpoint: Path) -> Iterator[LiveStack]:
    with live_stack(checkpoint) as live:
        yield live


def levels(mine: Pixels, theirs: Pixels) -> int:
    """The largest difference."""
    assert mine.shape == theirs.shape
    return int(np.abs(mine.astype(int) - theirs.astype(int)).max())


async def edited(
    http: aiohttp.ClientSession, image: Pixels, **fields: object
) -> tuple[Pixels, dict[str, Any]]:
    """The picture and what is told of it."""
    form = edit_form(file(image), file(MASK), **ASKED, mask_blur=0, strength=0.8, **fields)
    async with http.post("/v1/images/edits", data=form) as answer:
        body = await answer.json()
        assert answer.status == 200, body
    return pixels(base64.b64decode(body["data"][0]["b64_json"])), body["giornata"]


@pytest.mark.long
async def test_edits_and_generations_are_those_of_the_pipelines(
    painters: LiveStack, checkpoint: Path, tmp_path: Path
) -> None:
    of, original, inside = open_family("sd3", lambda _: checkpoint, tmp_path), picture(), MASK > 0
    asked = Asked({"guidance_scale": 3.0, "negative_prompt": NEGATIVE}, strength=0.8, seed=SEED, size=SIZE)
    shown: dict[str, Any] = {"image": Image.fromarray(original), "mask_image": Image.fromarray(MASK)}
    wanted = of.called(of.case.inpaints, asked, **shown).picture
    async with aiohttp.ClientSession(painters.url) as http:
        painted, _ = await edited(http, original, reuse="off")
        assert levels(painted[inside], wanted[inside]) <= 1
        assert np.array_equal(painted[~inside], original[~inside])
        made = ASKED | {"size": f"{SIZE.width}x{SIZE.height}"}
        async with http.post("/v1/images/generations", json=made) as answer:
            body = await answer.json()
            assert answer.status == 200, body
        generated = pixels(base64.b64decode(body["data"][0]["b64_json"]))
        assert levels(generated, of.generated(asked).picture) <= 1
        form = aiohttp.FormData()
        form.add_field("image", file(original), filename="image.png", content_type="image/png")
        async with http.post("/v1/templates", data=form) as answer:
            assert answer.status == 202, await answer.text()
            location = answer.headers["Location"]
        async with http.get(location, params={"wait_ms": 60_000}) as answer:
            assert (await answer.json())["state"] == "ready"
        taken, told = await edited(http, original)
        assert told["template"] == ["hit"]
        assert np.array_equal(taken[~inside], original[~inside])
        assert taken[inside].std() > 5
