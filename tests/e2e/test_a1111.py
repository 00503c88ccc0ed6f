"""A1111's API of a whole stack of the model that ships, asked by `webuiapi`, a published client of A1111."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import webuiapi
from PIL import Image

from giornata.fleet import Fleet
from giornata.wire.workers import RowProgress
from tests.e2e.dialects import ALICE, BOB, MASK, PROMPT, SCENE, shipped
from tests.e2e.live import LiveStack, slowly
from tests.e2e.pictures import edit_form, file, pixels
from tests.patience import HUNG_S

STEPS = 4
STEP_S = 0.2


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, pace: Path) -> Iterator[LiveStack]:
    with shipped(tmp_path_factory.mktemp("shipped"), pace) as live:
        yield live


def client_of(stack: LiveStack, key: str) -> Any:
    host, port = stack.url.removeprefix("http://").split(":")
    return webuiapi.WebUIApi(host=host, port=int(port), username="anybody", password=key, steps=STEPS)


@pytest.fixture
def alice(stack: LiveStack) -> Iterator[Any]:
    client = client_of(stack, ALICE)
    with client.session:
        yield client


def array(image: Image.Image) -> Any:
    return np.asarray(image.convert("RGB")).astype(int)


def outside() -> Any:
    """Where the mask and its feather of four pixels paint nothing."""
    marked = np.asarray(MASK) > 0
    near = np.zeros_like(marked)
    for row, column in zip(*np.nonzero(marked), strict=True):
        near[max(0, row - 16) : row + 17, max(0, column - 16) : column + 17] = True
    return ~near


async def test_an_edit_is_the_one_of_the_other_api(stack: LiveStack, alice: Any) -> None:
    given = {"images": [SCENE], "mask_image": MASK, "prompt": PROMPT, "seed": 7}
    answer = await asyncio.to_thread(alice.img2img, **given)
    edited = array(answer.image)
    assert edited.shape == array(SCENE).shape
    assert (edited[outside()] == array(SCENE)[outside()]).all()
    assert (edited != array(SCENE)).any()
    assert (answer.info["all_seeds"], answer.info["steps"], answer.info["sd_model_name"]) == (
        [7],
        STEPS,
        "tiny",
    )
    form = edit_form(
        file(np.asarray(SCENE)), file(np.asarray(MASK)), prompt=PROMPT, strength=1, padding_mask_crop=0,
        num_inference_steps=STEPS, seed=7, mask_mode="white", mask_blur=4,
    )  # fmt: skip
    # an edit takes what its tenant's edits of the picture have left (record 0008): the first one of each is alike
    headers = {"Authorization": f"Bearer {BOB}"}
    async with (
        aiohttp.ClientSession(stack.url, headers=headers) as http,
        http.post("/v1/images/edits", data=form) as own,
    ):
        body = await own.json()
        assert own.status == 200, body
    assert np.abs(pixels(base64.b64decode(body["data"][0]["b64_json"])).astype(int) - edited).max() <= 2


@pytest.fixture
async def ready(stack: LiveStack) -> None:
    """The LoRAs that ship have been checked."""
    await stack.until(lambda fleet: any(state.loras and state.loras.ready == 2 for state in fleet.all()))


def test_lists_tell_what_is_served(alice: Any, ready: None) -> None:
    [title] = alice.util_get_model_names()
    assert title.startswith("tiny [")
    assert alice.util_get_current_model() == title
    assert alice.util_get_sampler_names() == ["Euler"]
    assert {lora["name"] for lora in alice.get_loras()} == {"outlined", "swapped"}
    alice.util_set_model("tiny")
    alice.util_wait_for_ready()


def test_loras_and_controlnets_change_the_picture(alice: Any, ready: None) -> None:
    given = {
        "images": [SCENE],
        "mask_image": MASK,
        "seed": 7,
        "inpaint_full_res": False,
        "width": 128,
        "height": 128,
    }
    plain = array(alice.img2img(prompt=PROMPT, **given).image)
    with_lora = array(alice.img2img(prompt=f"{PROMPT} <lora:swapped:1>", **given).image)
    lines = Image.fromarray(np.asarray(MASK) // 2)
    unit = webuiapi.ControlNetUnit(image=lines, model="outline", weight=0.8)
    with_control = array(
        alice.img2img(prompt=PROMPT, controlnet_units=[unit], alwayson_scripts={}, **given).image
    )
    for changed in (with_lora, with_control):
        assert np.abs(changed - plain).max() > 20
        assert (changed[outside()] == plain[outside()]).all()


def test_what_the_model_cannot_do_is_told(alice: Any) -> None:
    with pytest.raises(RuntimeError, match="task_not_supported"):
        alice.txt2img(prompt=PROMPT)
    with pytest.raises(RuntimeError, match="restore_faces"):
        alice.img2img(images=[SCENE], prompt=PROMPT, restore_faces=True)
    with pytest.raises(RuntimeError, match=r'"size_mismatch".*"param":"width"'):
        alice.img2img(images=[SCENE], prompt=PROMPT, width=512, height=640)


async def test_only_its_owner_follows_and_interrupts_an_edit(
    stack: LiveStack, alice: Any, pace: Path
) -> None:
    bob, watcher = client_of(stack, BOB), client_of(stack, ALICE)
    with bob.session, watcher.session, ThreadPoolExecutor(1) as thread, slowly(pace, STEP_S):
        given = {"images": [SCENE], "mask_image": MASK, "prompt": PROMPT, "steps": 200}
        editing = thread.submit(alice.img2img, **given)
        await stack.until(lambda fleet: any(row.step > 2 for row in rows_of(fleet)))
        told = await asyncio.to_thread(watcher.get_progress)
        assert 0 < told["progress"] < 1
        assert 0 < told["state"]["sampling_step"] < 200
        assert (told["state"]["job_count"], told["state"]["sampling_steps"]) == (1, 200)
        assert bob.get_progress()["state"]["job_count"] == 0
        assert bob.interrupt() == {}
        assert watcher.get_progress()["state"]["interrupted"] is False
        assert watcher.interrupt() == {}
        with pytest.raises(RuntimeError, match="job_cancelled"):
            await asyncio.wait_for(asyncio.wrap_future(editing), HUNG_S)


def rows_of(fleet: Fleet) -> list[RowProgress]:
    return [row for state in fleet.all() if state.worker is not None for row in state.worker.running]
