"""The model that ships, with everything beside it, over an object store: masks of words, ControlNets, step caches.

What each of them makes in detail is tested where it is made; here both doors, and all services between, see the same.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import pytest

import giornata.client
from giornata.client import Client
from giornata.fleet import Fleet
from giornata.wire.errors import ControlNetNotFound, NothingFound
from giornata.wire.messages import INLINE_BYTES
from giornata.wire.workers import ServiceName, StepCacheCounters
from giornata_lab.bench.systems.edit_forms import Pixels, file, pixels
from tests.e2e.jobs import answered, first_picture, form_of
from tests.e2e.live import LiveStack
from tests.e2e.stacks import ALICE, MASK, PROMPT, SCENE
from tests.s3_server import CREDENTIALS

IMAGE, MARKED = file(np.asarray(SCENE)), file(np.asarray(MASK))
ASKED: dict[str, Any] = {"prompt": PROMPT, "seed": 3, "mask_mode": "white", "reuse": "off"}
SIDE = 128
DISCS = (((34, 34), (204, 38, 38)), ((92, 92), (38, 76, 204)))
"""Centre (row, column) and colour."""
RADIUS = 22
WORDS: dict[str, Any] = {"mask_prompt": "all shapes", "max_regions": 2}


def discs() -> Pixels:
    """Two discs on grey, (128, 128, 3) uint8: they are found, whatever a segmenter's details are."""
    picture = np.full((SIDE, SIDE, 3), 225, np.uint8)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    for (row, column), colour in DISCS:
        picture[(rows - row) ** 2 + (columns - column) ** 2 <= RADIUS**2] = colour
    return picture


@pytest.fixture
async def http(shipped: LiveStack) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"Authorization": f"Bearer {ALICE}"}
    async with aiohttp.ClientSession(shipped.url, headers=headers) as session:
        yield session


@pytest.fixture
async def client(shipped: LiveStack, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    async with giornata.client.connect(
        shipped.nats_url, api_key=ALICE, tenant="alice", blobs_url=shipped.blobs_url
    ) as connected:
        yield connected


async def over_http(http: aiohttp.ClientSession, files: dict[str, bytes], **fields: object) -> Pixels:
    return first_picture(await answered(http, data=form_of(files, **fields))).astype(int)


async def over_nats(client: Client, **fields: Any) -> Pixels:
    (picture,) = (await (await client.edit(**fields)).result()).pictures
    return pixels(picture.data).astype(int)


async def test_words_are_the_same_mask_and_the_same_edit_at_both_doors(
    http: aiohttp.ClientSession, client: Client
) -> None:
    picture = discs()
    form = form_of({"image": file(picture)}, prompt=WORDS["mask_prompt"], max_regions=2)
    shown = await answered(http, "/v1/masks", data=form)
    whole, *regions = (base64.b64decode(one["b64_png"]) for one in (shown, *shown["regions"]))
    assert len(regions) == 2
    for (row, column), _ in DISCS:
        assert sum(bool(pixels(region)[row, column]) for region in regions) == 1, "each disc is one region"
    made = await client.mask(image=file(picture), prompt=WORDS["mask_prompt"], max_regions=2)
    assert (made.data, [one.data for one in made.regions]) == (whole, regions)

    asked: dict[str, Any] = {**ASKED, "num_inference_steps": 2, "mask_blur": 0}
    del asked["mask_mode"]
    edited = await over_http(http, {"image": file(picture)}, **asked, **WORDS)
    assert np.array_equal(edited, await over_nats(client, image=file(picture), **asked, **WORDS))
    assert np.array_equal(edited, await over_http(http, {"image": file(picture), "mask": whole}, **asked))
    masked = pixels(whole) > 0
    assert np.array_equal(edited[~masked], picture[~masked]), "outside of the regions nothing changes"
    for region in regions:
        there = pixels(region) > 0
        assert not np.array_equal(edited[there], picture[there]), "each region is repainted"
    blank = file(np.full_like(picture, 225))
    with pytest.raises(NothingFound):
        await client.edit(image=blank, mask_prompt="the red circle", mask_threshold=0.999, **asked)


async def test_a_controlnet_that_a_service_computes_is_followed_at_both_doors(
    http: aiohttp.ClientSession, client: Client, shipped: LiveStack
) -> None:
    async with http.get("/v1/models") as answer:
        (told,) = (await answer.json())["data"]
    assert [net["name"] for net in told["controlnets"]] == ["outline"]
    asked = {**ASKED, "num_inference_steps": 4}
    files = {"image": IMAGE, "mask": MARKED, "control_image_0": MARKED}

    async def under(**control: object) -> Pixels:
        named = json.dumps([{"model": "outline", "image": 0, **control}])
        return await over_http(http, files, **asked, controlnets=named)

    full, none, half = await under(), await under(scale=0), await under(end=0.5)
    assert min(np.abs(full - one).max() for one in (none, half)) > 8
    seen = json.dumps([{"model": "outline", "annotator": "canny"}])
    annotated = await over_http(http, {"image": IMAGE, "mask": MARKED}, **asked, controlnets=seen)
    assert np.abs(annotated - full).max() > 8
    given: dict[str, Any] = {"image": IMAGE, "mask": MARKED, "control_image": [MARKED], **asked}
    assert (
        np.abs(await over_nats(client, controlnets=[{"model": "outline", "image": 0}], **given) - full).max()
        <= 1
    )
    with pytest.raises(ControlNetNotFound, match="outline"):
        await client.edit(controlnets=[{"model": "depth", "image": 0}], **given)
    await shipped.until(lambda fleet: any(s.control.steps_total >= 12 for s in fleet.all() if s.control))


def counted(fleet: Fleet) -> StepCacheCounters:
    """Counters of the one denoiser."""
    found = [state.worker.step_cache for state in fleet.all() if state.worker and state.worker.step_cache]
    return found[0] if found else StepCacheCounters()


async def test_pictures_with_step_caches_are_near_those_without_and_blocks_are_counted(
    client: Client, shipped: LiveStack
) -> None:
    asked = {"image": IMAGE, "mask": MARKED, "num_inference_steps": 12, **ASKED}
    exact = await over_nats(client, **asked)
    assert np.array_equal(await over_nats(client, **asked), exact), "the same seed makes the same picture"
    cached = await over_nats(client, **asked, step_cache="taylorseer", step_cache_interval=3)
    assert 0 < np.abs(cached - exact).mean() < 3
    await shipped.until(lambda fleet: counted(fleet).skipped_blocks > 0 < counted(fleet).computed_blocks)


async def test_a_large_picture_travels_as_a_claim_check_and_no_log_has_a_credential(
    client: Client, shipped: LiveStack
) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (1500, 1500, 3), dtype=np.uint8)
    picture = file(noise, compress_level=0)
    assert len(picture) > INLINE_BYTES
    mask = np.zeros(noise.shape[:2], np.uint8)
    mask[700:740, 700:740] = 255
    asked = {**ASKED, "num_inference_steps": 2, "padding_mask_crop": 8}
    assert (await over_nats(client, image=picture, mask=file(mask), **asked)).shape == noise.shape
    logs = "".join(shipped.log(name) for service in ServiceName for name in shipped.instances(service))
    assert not any(value in logs for value in (*CREDENTIALS.values(), ALICE))
