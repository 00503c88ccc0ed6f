"""Edits with step caches through every service and the shipped model: what is skipped is told, the rest refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import numpy as np
import pytest

import giornata.client
from giornata.fleet import Fleet
from giornata.wire.errors import InvalidField
from giornata.wire.workers import StepCacheCounters
from giornata_lab.quality.cases import draw, slots
from giornata_tools.checkout import TRAINED
from tests.e2e.live import LiveStack, live_stack
from tests.e2e.pictures import edit_form, file, pixels
from tests.patience import HUNG_S

STEPS = 20
SLOT = next(slot for slot in slots() if slot.task == "add" and slot.side == 128)
CASE = draw(SLOT)
IMAGE, MASK = file(CASE.bare), file((CASE.scene.mask * 255).astype(np.uint8))
ASKED: dict[str, Any] = {
    "prompt": f"a {SLOT.colour} {SLOT.shape}",
    "num_inference_steps": STEPS,
    "mask_mode": "white",
    "reuse": "off",
    "seed": 3,
}


@pytest.fixture(scope="module")
def fresco() -> Iterator[LiveStack]:
    with live_stack(TRAINED) as stack:
        yield stack


async def edited(stack: LiveStack, **fields: Any) -> Any:
    """(height, width, 3), signed: an edit through NATS."""
    async with giornata.client.connect(stack.nats_url) as client:
        edit = await client.edit(image=IMAGE, mask=MASK, **ASKED, **fields)
        (picture,) = (await edit.result()).pictures
    return pixels(picture.data or b"").astype(int)


def told(fleet: Fleet) -> StepCacheCounters:
    """Counters of the one denoiser."""
    found = [state.worker.step_cache for state in fleet.all() if state.worker and state.worker.step_cache]
    return found[0] if found else StepCacheCounters()


def skipped_more_than(blocks: int) -> Callable[[Fleet], bool]:
    return lambda fleet: told(fleet).skipped_blocks > blocks


async def counted_more_than(blocks: int, stack: LiveStack) -> int:
    """Return the skipped blocks that the gateway's metrics tell, once there are more.

    The router hears of the denoiser in its own time, and the gateway asks it four times a second.
    """
    async with aiohttp.ClientSession(stack.url) as http, asyncio.timeout(HUNG_S):
        while True:
            async with http.get("/metrics") as answer:
                lines = (await answer.text()).splitlines()
            counted = [
                line for line in lines if line.startswith("giornata_denoiser_step_cache_blocks_total{")
            ]
            values = {'outcome="skipped"' in line: float(line.rsplit(" ", 1)[1]) for line in counted}
            if values.get(True, 0) > blocks:
                assert values[False] > 0
                return int(values[True])
            await asyncio.sleep(0.1)


async def test_pictures_with_caches_are_near_those_without_and_blocks_are_counted(fresco: LiveStack) -> None:
    exact = await edited(fresco)
    assert np.array_equal(await edited(fresco), exact), "the same seed makes the same picture"
    blocks = 0
    for interval in (3, 2):
        cached = await edited(fresco, step_cache="taylorseer", step_cache_interval=interval)
        assert 0 < np.abs(cached - exact).mean() < 3, interval
        await fresco.until(skipped_more_than(blocks))
        blocks = await counted_more_than(blocks, fresco)


async def test_a_cache_that_means_nothing_is_refused_at_both_doors(fresco: LiveStack) -> None:
    form = edit_form(IMAGE, MASK, **{**ASKED, "step_cache": "first-block"})
    async with (
        aiohttp.ClientSession(fresco.url) as http,
        http.post("/v1/images/edits", data=form) as answer,
    ):
        error = (await answer.json())["error"]
    assert (answer.status, error["param"], error["code"]) == (400, "step_cache", "invalid_field")
    assert (error["received"], error["accepted"]) == ("first-block", "Input should be 'off' or 'taylorseer'")
    with pytest.raises(InvalidField, match="needs step_cache taylorseer"):
        await edited(fresco, step_cache_interval=3)
    async with aiohttp.ClientSession(fresco.url) as http, http.get("/v1/models") as answer:
        (model,) = (await answer.json())["data"]
    assert model["step_caches"] == ["taylorseer"]
    assert "step_cache_warmup" in model["fields"]["edit"]
