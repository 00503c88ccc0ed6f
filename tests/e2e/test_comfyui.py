"""The nodes for ComfyUI, loaded as ComfyUI loads them, against a whole stack; test_comfyui_itself.py has ComfyUI."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from giornata.fleet import Fleet
from giornata_lab.bench.systems.edit_forms import box, edit_form, pixels, scene
from tests import comfyui_nodes
from tests.e2e.live import LiveStack
from tests.patience import HUNG_S

MASK = torch.from_numpy(box() / 255).float()
IMAGE = torch.from_numpy(scene() / 255).float()[None]
QUICK = {"prompt": "a red hat", "seed": 7, "steps": 4, "reuse": "off"}


@pytest.fixture
def at(stack: LiveStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIORNATA_URL", stack.url)
    monkeypatch.delenv("GIORNATA_API_KEY", raising=False)


def run(**inputs: Any) -> Any:
    return comfyui_nodes.run("GiornataEdit", **inputs)


async def test_a_node_edits_as_the_gateway_does(stack: LiveStack, at: None) -> None:
    edited = await asyncio.to_thread(run, image=IMAGE, mask=MASK[None], mask_blur=2.0, **QUICK)
    assert (edited.shape, edited.dtype) == (IMAGE.shape, torch.float32)
    form = edit_form(mask_blur=2, mask_mode="white", reuse="off", response_format="image")
    async with aiohttp.ClientSession(stack.url) as http, http.post("/v1/images/edits", data=form) as answer:
        assert answer.status == 200
        own = pixels(await answer.read())
    assert np.abs(edited[0].numpy() * 255 - own).max() <= 2
    assert (edited != IMAGE).any()
    assert torch.equal(edited[0, :8], IMAGE[0, :8])


class Interrupted(Exception):
    """What ComfyUI raises in a node when its user stops the workflow."""


async def test_comfyui_is_told_of_steps_and_stops_an_edit(
    stack: LiveStack, at: None, slow_steps: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    values: list[int] = []

    class Bar:
        def __init__(self, total: int) -> None:
            assert total == 100

        def update_absolute(self, value: int, total: int, preview: Any) -> None:
            assert total == 100
            values.append(value)

    def stop() -> None:
        if values and values[-1] > 2:
            raise Interrupted

    comfy, utils, management = (
        ModuleType(name) for name in ("comfy", "comfy.utils", "comfy.model_management")
    )
    vars(utils)["ProgressBar"], vars(management)["throw_exception_if_processing_interrupted"] = Bar, stop
    for module in (comfy, utils, management):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(Interrupted):
        await asyncio.wait_for(
            asyncio.to_thread(run, image=IMAGE, mask=MASK, **QUICK | {"steps": 100}), HUNG_S
        )
    assert values == sorted(values)
    assert values[-1] < 50
    await stack.until(idle)


def idle(fleet: Fleet) -> bool:
    return not any(state.worker.running for state in fleet.all() if state.worker is not None)
