"""A template from its registration to its end: registered, recorded, edited by its id, deleted."""

from __future__ import annotations

import base64
from typing import Any

import aiohttp
import numpy as np
import pytest

import giornata.client
from giornata.wire.errors import TemplateNotFound
from giornata.wire.requests import Reuse
from giornata_lab.bench.systems.edit_forms import box, file, pixels, scene
from tests.e2e.jobs import settled
from tests.e2e.live import LiveStack


def form_of(image: bytes | None = None, mask: bytes | None = None, /, **fields: object) -> aiohttp.FormData:
    form = aiohttp.FormData()
    for name, data in (("image", image), ("mask", mask)):
        if data is not None:
            form.add_field(name, data, filename=f"{name}.png", content_type="image/png")
    for name, value in fields.items():
        form.add_field(name, str(value))
    return form


async def edited(http: aiohttp.ClientSession, **fields: object) -> dict[str, Any]:
    asked = {"prompt": "a red hat", "num_inference_steps": 4, "seed": 7, "mask_blur": 0, **fields}
    async with http.post("/v1/images/edits", data=form_of(None, file(box()), **asked)) as answer:
        body: dict[str, Any] = await answer.json()
        assert answer.status == 200, body
        return body


async def test_a_template_is_registered_recorded_edited_and_deleted(
    http: aiohttp.ClientSession, stack: LiveStack
) -> None:
    original = scene()
    async with http.post("/v1/templates", data=form_of(file(original))) as answer:
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
    result = pixels(base64.b64decode(first["data"][0]["b64_json"]))
    inside = box() == 255
    assert np.array_equal(result[~inside], original[~inside])
    assert np.abs(result[inside].astype(int) - original[inside]).mean() > 5

    # Without reuse alone are equal edits equal pictures: with it, plans follow what loads have taken.
    computed = await edited(http, template_id=name, reuse="off")
    assert computed["giornata"]["template"] == ["off"]
    over_rest = pixels(base64.b64decode(computed["data"][0]["b64_json"])).astype(int)
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
    async with http.get(location) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (404, "template_not_found")
    gone = form_of(None, file(box()), prompt="a red hat", template_id=name)
    async with http.post("/v1/images/edits", data=gone) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (404, "template_not_found")
    async with giornata.client.connect(stack.nats_url) as client:
        with pytest.raises(TemplateNotFound):
            await client.edit(template_id=name, prompt="a red hat")
