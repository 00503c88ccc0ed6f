"""The nodes in ComfyUI itself, over its own HTTP API, against a whole stack of the model that ships."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from giornata.fleet import Fleet
from giornata_lab.bench.systems.edit_forms import Pixels, edit_form, file, pixels
from giornata_tools.launcher.plan import free_ports
from tests.e2e import comfyui_itself
from tests.e2e.comfyui_itself import ComfyUI
from tests.e2e.live import LiveStack, slowly
from tests.e2e.stacks import ALICE, MASK, PROMPT, SCENE, SERVED_AS

pytestmark = pytest.mark.long

EDIT: dict[str, Any] = {"prompt": PROMPT, "steps": 4, "reuse": "off", "mask_blur": 0.0}
SEED = 2**40 + 7


@pytest.fixture
def stack(shipped: LiveStack) -> LiveStack:
    return shipped


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return comfyui_itself.install(tmp_path_factory.mktemp("comfyui"))


@pytest.fixture
async def comfyui(installed: Path, stack: LiveStack, tmp_path: Path) -> AsyncIterator[ComfyUI]:
    env = {"GIORNATA_URL": stack.url, "GIORNATA_API_KEY": ALICE}
    async with comfyui_itself.started(installed, tmp_path / "comfyui", free_ports(1)[0], env) as running:
        SCENE.save(running.folder / "input" / "scene.png")
        MASK.save(running.folder / "input" / "mask.png")
        yield running


def workflow(more: dict[str, Any] | None = None, image: str = "picture", **inputs: Any) -> dict[str, Any]:
    """A picture and a mask, loaded, edited and saved, as ComfyUI's page exports it for its API."""
    edit = {"image": [image, 0], "mask": ["mask", 0], "seed": SEED, **EDIT, **inputs}
    return {
        "picture": {"class_type": "LoadImage", "inputs": {"image": "scene.png"}},
        "mask": {"class_type": "LoadImageMask", "inputs": {"image": "mask.png", "channel": "red"}},
        "edit": {"class_type": "GiornataEdit", "inputs": edit},
        "save": {"class_type": "SaveImage", "inputs": {"images": ["edit", 0], "filename_prefix": "edited"}},
        **(more or {}),
    }


async def by_gateway(stack: LiveStack, *, control: bool = False, **fields: Any) -> Pixels:
    """The same edit, asked for without ComfyUI; with `control` the picture is its own control image."""
    asked = {
        "prompt": PROMPT,
        "mask_blur": 0,
        "mask_mode": "white",
        "reuse": "off",
        "response_format": "image",
    }
    form = edit_form(file(np.asarray(SCENE)), file(np.asarray(MASK)), **asked | fields)
    if control:
        form.add_field("control_image_0", file(np.asarray(SCENE)), filename="control.png")
    headers = {"Authorization": f"Bearer {ALICE}"}
    async with (
        aiohttp.ClientSession(stack.url, headers=headers) as http,
        http.post("/v1/images/edits", data=form) as answer,
    ):
        assert answer.status == 200, await answer.text()
        return pixels(await answer.read())


def same(path: Path, other: Pixels) -> bool:
    return bool(np.abs(pixels(path.read_bytes()).astype(int) - other).max() <= 2)


async def test_a_workflow_edits_as_the_gateway_does(comfyui: ComfyUI, stack: LiveStack) -> None:
    [saved] = await comfyui.run(workflow())
    assert same(saved, await by_gateway(stack))
    values = [message["data"]["value"] for message in comfyui.told if message["type"] == "progress"]
    assert values == sorted(values)
    assert values[-1] == 100
    assert len(set(values)) >= 4, "each step, not the end alone"
    assert comfyui.previews
    assert all(picture[:2] == b"\xff\xd8" for picture in comfyui.previews), "JPEG"

    twice = {"twice": {"class_type": "RepeatImageBatch", "inputs": {"image": ["picture", 0], "amount": 2}}}
    batch = await comfyui.run(workflow(twice, image="twice", batch_size=2))
    assert len(batch) == 4
    assert [same(path, await by_gateway(stack, seed=7 + index)) for index, path in enumerate(batch)] == [
        True
    ] * 4


async def test_names_are_offered_and_guide(comfyui: ComfyUI, stack: LiveStack) -> None:
    assert (await comfyui.info("GiornataEdit"))["optional"]["model"][0] == ["(not set)", SERVED_AS]
    [_, *nets] = (await comfyui.info("GiornataControlNet"))["required"]["controlnet"][0]
    [_, lora, *_] = (await comfyui.info("GiornataLora"))["required"]["lora"][0]
    assert nets == ["outline"]
    guides = {
        "lora": {"class_type": "GiornataLora", "inputs": {"lora": lora, "scale": 0.8}},
        "net": {
            "class_type": "GiornataControlNet",
            "inputs": {
                "controlnet": "outline",
                "image": ["picture", 0],
                "scale": 0.5,
                "start": 0.0,
                "end": 0.75,
            },
        },
    }
    [guided] = await comfyui.run(workflow(guides, model=SERVED_AS, loras=["lora", 0], controlnets=["net", 0]))
    expected = await by_gateway(
        stack,
        loras=json.dumps([{"id": lora.split()[-1], "scale": 0.8}]),
        controlnets=json.dumps([{"model": "outline", "image": 0, "scale": 0.5, "end": 0.75}]),
        control=True,
    )
    assert same(guided, expected)
    assert not same(guided, await by_gateway(stack))


async def test_a_refusal_reaches_the_user_in_words(comfyui: ComfyUI) -> None:
    name = await comfyui.queue(workflow(model="another"))
    end = await comfyui.until("execution_success", "execution_error", prompt=name)
    assert end["type"] == "execution_error"
    assert "The input model was: another. Accepted: tiny." in end["exception_message"]


async def test_the_button_to_stop_ends_the_edit(comfyui: ComfyUI, stack: LiveStack, pace: Path) -> None:
    with slowly(pace, 0.2):
        name = await comfyui.queue(workflow(steps=200))
        await comfyui.until("progress", prompt=name)
        async with comfyui.http.post("/interrupt") as answer:
            assert answer.status == 200
        end = await comfyui.until("execution_success", "execution_interrupted", prompt=name)
        assert end["type"] == "execution_interrupted"
        await stack.until(idle)


def idle(fleet: Fleet) -> bool:
    return not any(state.worker.running for state in fleet.all() if state.worker is not None)
