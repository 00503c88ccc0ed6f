"""A template from its registration to its end: registered, recorded, edited by its id, deleted."""

from __future__ import annotations

from typing import Any

import aiohttp
import numpy as np
import pytest

import giornata.client
from giornata.wire.errors import TemplateNotFound
from giornata.wire.requests import Reuse
from giornata_lab.bench.systems.edit_forms import box, file, pixels, scene
from tests.e2e.jobs import answered, first_picture, form_of, settled
from tests.e2e.live import LiveStack


async def edited(http: aiohttp.ClientSession, **fields: object) -> dict[str, Any]:
    asked = {"prompt": "a red hat", "num_inference_steps": 4, "seed": 7, "mask_blur": 0, **fields}
    return await answered(http, data=form_of({"mask": file(box())}, **asked))


async def test_a_template_is_registered_recorded_edited_and_deleted(
    http: aiohttp.ClientSession, stack: LiveStack
) -> None:
    original = scene()
    async with http.post("/v1/templates", data=form_of({"image": file(original)})) as answer:
        registered = await answer.json()
        assert answer.status == 202, registered
        location = answer.headers["Location"]
    assert (registered["width"], registered["height"]) == (128, 96)
    ready = await settled(http, location)
    assert (ready["state"], ready["error"]) == ("ready", None)
    assert ready["bytes"] > 0

    name = registered["id"]
    first = await edited(http, template_id=name)
    assert first["giornata"]["template"] == ["hit"]
    assert 0 < first["giornata"]["computed_tokens"][0] < 48
    result = first_picture(first)
    inside = box() == 255
    assert np.array_equal(result[~inside], original[~inside])
    assert np.abs(result[inside].astype(int) - original[inside]).mean() > 5

    # Without reuse alone are equal edits equal pictures: with it, plans follow what loads have taken.
    computed = await edited(http, template_id=name, reuse="off")
    assert computed["giornata"]["template"] == ["off"]
    over_rest = first_picture(computed).astype(int)
    async with giornata.client.connect(stack.nats_url) as client:
        edit = await client.edit(
            template_id=name,
            mask=file(box()),
            prompt="a red hat",
            num_inference_steps=4,
            seed=7,
            mask_blur=0,
            reuse=Reuse.OFF,
        )
        over_nats = pixels((await edit).pictures[0].data or b"").astype(int)
    assert np.abs(over_nats - over_rest).max() <= 1

    async with http.delete(location) as answer:
        assert (answer.status, (await answer.json())["deleted"]) == (200, True)
    async with giornata.client.connect(stack.nats_url) as client:
        with pytest.raises(TemplateNotFound):
            await client.edit(template_id=name, prompt="a red hat")
