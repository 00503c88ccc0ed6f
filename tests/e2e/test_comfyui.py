"""The nodes for ComfyUI, loaded as ComfyUI loads them, against a whole stack; ComfyUI itself is not here."""

from __future__ import annotations

import asyncio
import sys
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from giornata.fleet import Fleet
from giornata.wire.requests import Reuse
from tests.e2e.live import LiveStack
from tests.e2e.pictures import box, edit_form, pixels, scene
from tests.patience import HUNG_S

FOLDER = Path(__file__).parents[2] / "deploy" / "comfyui"
MASK = torch.from_numpy(box() / 255).float()
IMAGE = torch.from_numpy(scene() / 255).float()[None]
QUICK = {"prompt": "a red hat", "seed": 7, "steps": 4, "reuse": "off"}


@pytest.fixture
def mappings(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The nodes by name. ComfyUI names the package by its path."""
    name = str(FOLDER).replace(".", "_x_")
    spec = util.spec_from_file_location(
        name, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    assert module.NODE_DISPLAY_NAME_MAPPINGS.keys() == module.NODE_CLASS_MAPPINGS.keys()
    nodes: dict[str, Any] = module.NODE_CLASS_MAPPINGS
    return nodes


@pytest.fixture
def node(mappings: dict[str, Any]) -> Any:
    return mappings["GiornataEdit"]()


@pytest.fixture
def at(stack: LiveStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIORNATA_URL", stack.url)
    monkeypatch.delenv("GIORNATA_API_KEY", raising=False)


def run(node: Any, **inputs: Any) -> Any:
    """The outputs of a node, as ComfyUI asks for them: by keyword, and one for each of RETURN_TYPES."""
    outputs = getattr(node, node.FUNCTION)(**inputs)
    assert isinstance(outputs, tuple)
    assert len(outputs) == len(node.RETURN_TYPES)
    return outputs[0]


def test_a_node_keeps_comfyuis_contract(mappings: dict[str, Any]) -> None:
    for kind in mappings.values():
        inputs = kind.INPUT_TYPES()
        assert inputs.keys() <= {"required", "optional", "hidden"}
        taken = getattr(kind, kind.FUNCTION).__kwdefaults__ or {}
        assert {
            name: given[1]["default"] for name, given in inputs["optional"].items() if len(given) > 1
        } == {name: value for name, value in taken.items() if name != "reuse"}
        for given in (*inputs["required"].values(), *inputs["optional"].values()):
            assert isinstance(given[0], list) or given[0] in {"IMAGE", "MASK", "STRING", "INT", "FLOAT"}
        assert kind.RETURN_TYPES == ("IMAGE",)
        assert kind.CATEGORY.startswith("image/")
        [choices] = inputs["optional"]["reuse"]
        assert taken["reuse"] == choices[0]
        assert choices == list(Reuse)


async def test_a_node_edits_as_the_gateway_does(stack: LiveStack, node: Any, at: None) -> None:
    edited = await asyncio.to_thread(run, node, image=IMAGE, mask=MASK[None], mask_blur=2.0, **QUICK)
    assert (edited.shape, edited.dtype) == (IMAGE.shape, torch.float32)
    form = edit_form(mask_blur=2, mask_mode="white", reuse="off", response_format="image")
    async with aiohttp.ClientSession(stack.url) as http, http.post("/v1/images/edits", data=form) as answer:
        assert answer.status == 200
        own = pixels(await answer.read())
    assert np.abs(edited[0].numpy() * 255 - own).max() <= 2
    assert (edited != IMAGE).any()
    assert torch.equal(edited[0, :8], IMAGE[0, :8])


def test_every_picture_of_a_batch_is_edited(node: Any, at: None) -> None:
    other = torch.from_numpy(scene(seed=1) / 255).float()[None]
    edited = run(node, image=torch.cat([IMAGE, other]), mask=MASK, **QUICK)
    assert edited.shape == (2, *IMAGE.shape[1:])
    assert torch.equal(edited[:, :8], torch.cat([IMAGE, other])[:, :8])
    alone = run(node, image=other, mask=MASK, **QUICK | {"seed": 8})
    assert (edited[1:] - alone).abs().max() <= 2 / 255


def test_why_there_is_no_picture_is_told(node: Any, at: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"model\b.*another"):
        run(node, image=IMAGE, mask=MASK, **QUICK | {"model": "another"})
    with pytest.raises(RuntimeError, match="mask"):
        run(node, image=IMAGE, mask=MASK * 0, **QUICK)
    with pytest.raises(ValueError, match=r"received \(3, 96, 128\)"):
        run(node, image=IMAGE, mask=MASK.expand(3, -1, -1), **QUICK)
    monkeypatch.setenv("GIORNATA_URL", "http://127.0.0.1:9")
    with pytest.raises(RuntimeError, match=r"http://127\.0\.0\.1:9 does not answer"):
        run(node, image=IMAGE, mask=MASK, **QUICK)


class Interrupted(Exception):
    """What ComfyUI raises in a node when its user stops the workflow."""


async def test_comfyui_is_told_of_steps_and_stops_an_edit(
    stack: LiveStack, node: Any, at: None, slow_steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    values: list[int] = []

    class Bar:
        def __init__(self, total: int) -> None:
            assert total == 100

        def update_absolute(self, value: int) -> None:
            values.append(value)

    def stop() -> None:
        if values and values[-1] > 5:
            raise Interrupted

    comfy, utils, management = (
        ModuleType(name) for name in ("comfy", "comfy.utils", "comfy.model_management")
    )
    vars(utils)["ProgressBar"], vars(management)["throw_exception_if_processing_interrupted"] = Bar, stop
    for module in (comfy, utils, management):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(Interrupted):
        await asyncio.wait_for(
            asyncio.to_thread(run, node, image=IMAGE, mask=MASK, **QUICK | {"steps": 100}), HUNG_S
        )
    assert values == sorted(values)
    assert values[-1] < 50
    await stack.until(idle)


def idle(fleet: Fleet) -> bool:
    return not any(state.worker.running for state in fleet.all() if state.worker is not None)
