"""A whole edit through every service, over HTTP and over NATS."""

from __future__ import annotations

import base64
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest

import giornata.client
from giornata.wire.errors import TemplateNotFound
from giornata.wire.messages import StepEvent
from giornata.wire.requests import Reuse
from giornata_lab.bench.systems.edit_forms import Pixels, box, edit_form, file, pixels, scene
from tests.e2e.jobs import answered, first_picture, form_of, settled
from tests.e2e.live import LiveStack


async def test_an_edit_tells_its_seeds_its_steps_and_the_time_of_each_stage(
    http: aiohttp.ClientSession,
) -> None:
    body = await answered(http, data=edit_form(file(scene(200, 136)), file(box(200, 136))))
    assert body["giornata"]["seeds"] == [7]
    assert body["giornata"]["steps"] == 4
    stages, computing = body["giornata"]["stage_ms"], body["giornata"]["compute_ms"]
    assert set(stages) == {"prepare", "queue", "denoise", "finish"}
    assert set(computing) == {"inspect", "encode", "denoise", "decode", "paste"}
    assert all(milliseconds > 0 for milliseconds in computing.values())
    assert sum(computing.values()) <= sum(stages.values())


@pytest.mark.parametrize("door", ["rest", "nats", "a1111", "openai"])
async def test_no_pixel_outside_of_the_users_mask_changes_unless_asked(
    stack: LiveStack, http: aiohttp.ClientSession, door: str
) -> None:
    """Of a mask on no grid, which the model sees grown to whole latents: only a blur that is asked for goes outward."""
    original, mask = scene(), np.zeros((96, 128), np.uint8)
    mask[21:54, 37:75] = 255
    mask[70, 5:90] = 255  # a strip of one pixel
    for blur in (None, 4):
        painted = await edited_at(door, stack, http, file(original), file(mask), blur)
        changed = (painted[..., :3] != original).any(-1)
        assert changed[mask == 255].mean() > 0.5
        assert changed[mask == 0].any() == (blur is not None)


async def edited_at(
    door: str, stack: LiveStack, http: aiohttp.ClientSession, image: bytes, mask: bytes, blur: int | None
) -> Pixels:
    """The picture of an edit at one of the doors; without a `blur` its request names none."""
    fields: dict[str, Any] = {"prompt": "a red hat", "seed": 7}
    asked: dict[str, Any] = {} if blur is None else {"mask_blur": blur}
    if door == "rest":
        return first_picture(await answered(http, data=edit_form(image, mask, **fields, **asked)))
    if door == "nats":
        async with giornata.client.connect(stack.nats_url) as client:
            edit = await client.edit(image=image, mask=mask, num_inference_steps=4, **fields, **asked)
            assert [told.step async for told in edit if isinstance(told, StepEvent)] == [1, 2, 3, 4]
            return pixels((await edit.result()).pictures[0].data or b"")
    if door == "a1111":
        inline = {name: base64.b64encode(data).decode() for name, data in (("image", image), ("mask", mask))}
        body = {"init_images": [inline["image"]], "mask": inline["mask"], "steps": 4, **fields, **asked}
        async with http.post("/sdapi/v1/img2img", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return pixels(base64.b64decode((await answer.json())["images"][0]))
    async with openai.AsyncOpenAI(api_key="unused", base_url=f"{stack.url}/v1", max_retries=0) as client:
        made = await client.images.edit(
            image=("image.png", image, "image/png"),
            mask=("mask.png", mask, "image/png"),
            prompt=fields["prompt"],
            extra_body={"num_inference_steps": 4, "seed": 7, "mask_mode": "white", **asked},
        )
    assert made.data
    return pixels(base64.b64decode(made.data[0].b64_json or ""))


# A template from its registration to its end: registered, recorded, edited by its id, deleted.


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
