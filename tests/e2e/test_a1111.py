"""A1111's API of a whole stack of the model that ships, asked by `webuiapi`, a published client of A1111."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import webuiapi
from PIL import Image

from tests.e2e.live import LiveStack
from tests.e2e.stacks import ALICE, MASK, PROMPT, SCENE

STEPS = 4


@pytest.fixture
def alice(shipped: LiveStack) -> Iterator[Any]:
    host, port = shipped.url.removeprefix("http://").split(":")
    client = webuiapi.WebUIApi(host=host, port=int(port), username="anybody", password=ALICE, steps=STEPS)
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


@pytest.fixture
async def ready(shipped: LiveStack) -> None:
    """The LoRAs that ship have been checked."""
    await shipped.until(lambda fleet: any(state.loras and state.loras.ready == 2 for state in fleet.all()))


def test_loras_and_controlnets_change_the_picture(alice: Any, ready: None) -> None:
    given = {
        "images": [SCENE], "mask_image": MASK, "seed": 7, "inpaint_full_res": False, "width": 128, "height": 128,
    }  # fmt: skip
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
