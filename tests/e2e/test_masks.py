"""Edits by words through the whole system, with model and segmenter that ship: both doors, and each region alone.

What the segmenter finds in detail is its own affair (tests/lab/model/test_sinopia.py): here two large discs are
found, and masks and pictures are held against each other.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

import giornata.client
from giornata.wire.errors import NothingFound
from giornata.wire.workers import ServiceName
from giornata_tools.checkout import SEGMENTER, TRAINED
from tests import comfyui_nodes
from tests.e2e.live import LiveStack, live_stack
from tests.e2e.pictures import Pixels, edit_form, file, pixels

SIDE = 128
DISCS = (((34, 34), (204, 38, 38)), ((92, 92), (38, 76, 204)))
"""Centre (row, column) and colour."""
RADIUS = 22
EDIT: dict[str, Any] = {
    "prompt": "a yellow star", "num_inference_steps": 2, "seed": 7, "mask_blur": 0, "reuse": "off",
}  # fmt: skip
WORDS = "all shapes"


def scene() -> Pixels:
    """Two discs on grey, (128, 128, 3) uint8."""
    picture = np.full((SIDE, SIDE, 3), 225, np.uint8)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    for (row, column), colour in DISCS:
        picture[(rows - row) ** 2 + (columns - column) ** 2 <= RADIUS**2] = colour
    return picture


SCENE = scene()
FILE = file(SCENE)


@pytest.fixture(scope="module")
def seeing() -> Iterator[LiveStack]:
    """A stack whose prepost makes masks from words."""
    seen = {ServiceName.PREPOST: {"GIORNATA_MASK_MODEL": str(SEGMENTER)}}
    with live_stack(TRAINED, env_of=seen) as live:
        yield live


@pytest.fixture
async def http(seeing: LiveStack) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(seeing.url) as session:
        yield session


async def shown(http: aiohttp.ClientSession) -> tuple[bytes, list[bytes]]:
    """The mask of both discs, and each region's own, as PNG."""
    form = aiohttp.FormData()
    form.add_field("image", FILE, filename="image.png", content_type="image/png")
    form.add_field("prompt", WORDS)
    form.add_field("max_regions", "2")
    async with http.post("/v1/masks", data=form) as response:
        answer = await response.json()
        assert response.status == 200, answer
    whole, *regions = (base64.b64decode(one["b64_png"]) for one in (answer, *answer["regions"]))
    return whole, regions


async def edited(http: aiohttp.ClientSession, mask: bytes | None = None, /, **fields: Any) -> Pixels:
    """The picture of an edit over REST; without a `mask` the fields name what it repaints."""
    form = aiohttp.FormData()
    if mask is None:
        form.add_field("image", FILE, filename="image.png", content_type="image/png")
        for name, value in ({"response_format": "image"} | EDIT | fields).items():
            form.add_field(name, str(value).lower() if isinstance(value, bool) else str(value))
    else:
        form = edit_form(FILE, mask, response_format="image", **(EDIT | fields))
    async with http.post("/v1/images/edits", data=form) as response:
        assert response.status == 200, await response.text()
        return pixels(await response.read())


async def test_words_are_the_same_mask_and_the_same_edit_at_both_doors(
    seeing: LiveStack, http: aiohttp.ClientSession
) -> None:
    whole, regions = await shown(http)
    assert len(regions) == 2
    for (row, column), _ in DISCS:
        assert sum(bool(pixels(region)[row, column]) for region in regions) == 1, "each disc is one region"
    async with giornata.client.connect(seeing.nats_url) as client:
        made = await client.mask(image=FILE, prompt=WORDS, max_regions=2)
        assert made.data == whole
        assert [one.data for one in made.regions] == regions
        words: dict[str, Any] = {"mask_prompt": WORDS, "max_regions": 2}
        over_nats = pixels((await (await client.edit(image=FILE, **EDIT, **words))).pictures[0].data)
    over_http = await edited(http, **words)
    assert np.array_equal(over_http, over_nats)
    assert np.array_equal(over_http, await edited(http, whole)), "as with the mask that was shown"
    masked = pixels(whole) > 0
    assert np.array_equal(over_http[~masked], SCENE[~masked]), "outside of the regions nothing changes"
    for region in regions:
        there = pixels(region) > 0
        assert not np.array_equal(over_http[there], SCENE[there]), "each region is repainted"


async def test_comfyuis_node_makes_the_mask_of_words(
    seeing: LiveStack, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIORNATA_URL", seeing.url)
    image = torch.from_numpy(SCENE / 255).float()[None]
    made = await asyncio.to_thread(comfyui_nodes.run, "GiornataMask", image=image, words=WORDS, max_regions=2)
    whole, _ = await shown(http)
    assert np.array_equal(made[0].numpy() == 1, pixels(whole) > 0)


async def test_regions_that_are_edited_one_by_one_are_the_edits_of_each(http: aiohttp.ClientSession) -> None:
    _, regions = await shown(http)
    expected = SCENE.astype(int)
    for index, region in enumerate(regions):
        alone = await edited(http, region, padding_mask_crop=32, seed=7 + index)
        there = pixels(region) > 0
        assert np.array_equal(alone[~there], SCENE[~there])
        expected[there] = alone[there]
    both = await edited(http, mask_prompt=WORDS, max_regions=2, auto_edit=True)
    assert np.abs(both - expected).max() <= 2, "rounding of a batch of two"
    masked = np.any([pixels(region) > 0 for region in regions], axis=0)
    assert np.array_equal(both[~masked], SCENE[~masked])


async def test_words_that_name_nothing_are_told_at_both_doors(
    seeing: LiveStack, http: aiohttp.ClientSession
) -> None:
    blank = file(np.full_like(SCENE, 225))
    words: dict[str, Any] = {"mask_prompt": "the red circle", "mask_threshold": 0.999}
    form = aiohttp.FormData()
    form.add_field("image", blank, filename="image.png", content_type="image/png")
    for name, value in (EDIT | words).items():
        form.add_field(name, str(value))
    async with http.post("/v1/images/edits", data=form) as response:
        told = (await response.json())["error"]
    assert (response.status, told["code"]) == (422, "nothing_found")
    assert "the red circle" in told["received"]
    async with giornata.client.connect(seeing.nats_url) as client:
        with pytest.raises(NothingFound):
            await client.edit(image=blank, **EDIT, **words)
        with pytest.raises(NothingFound):
            await client.mask(image=blank, prompt="the red circle", mask_threshold=0.999)
