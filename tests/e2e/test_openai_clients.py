"""OpenAI's packages for Python and for Node ask the same of a stack of the model that ships, and are told the same."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import openai
from openai.types import ImagesResponse

from giornata_lab.bench.systems.edit_forms import Pixels, box, file, pixels, scene
from tests.e2e.live import LiveStack
from tests.e2e.node_package import told
from tests.e2e.stacks import ALICE


async def by_node(stack: LiveStack, package: Path) -> dict[str, Any]:
    (package / "image.png").write_bytes(file(scene()))
    (package / "mask.png").write_bytes(file(box()))
    return await told(package, "client.mjs", f"{stack.url}/v1", ALICE, "image.png", "mask.png")


async def by_python(stack: LiveStack) -> Pixels:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=ALICE, max_retries=0) as client:
        answer = await client.images.edit(
            image=("image.png", file(scene())),
            mask=("mask.png", file(box())),
            prompt="a red hat",
            extra_body={"num_inference_steps": 4, "seed": 7, "reuse": "off"},
        )
    assert answer.data is not None
    return decoded(answer.data[0].b64_json)


def decoded(text: str | None) -> Pixels:
    return pixels(base64.b64decode(text or ""))


async def test_both_packages_are_told_the_same(package: Path, shipped: LiveStack) -> None:
    answered, picture = await by_node(shipped, package), await by_python(shipped)
    ImagesResponse.model_validate(answered["answer"], strict=True)
    same = decoded(answered["answer"]["data"][0]["b64_json"])
    assert np.abs(same.astype(int) - picture).max() <= 2
    assert (picture[:8] == scene()[:8]).all()
    assert answered["models"] == ["tiny"]

    kinds = [event["type"] for event in answered["events"]]
    assert kinds.count("image_edit.partial_image") == 1
    assert kinds[-1] == "image_edit.completed"
    assert "image_edit.progress" not in kinds, "OpenAI's clients do not know it"
    assert np.abs(decoded(answered["events"][-1]["b64_json"]).astype(int) - picture).max() <= 2

    assert answered["refused"] == {
        "field": {"kind": "BadRequestError", "status": 400, "code": "invalid_field", "param": "seed"},
        "generation": {
            "kind": "BadRequestError",
            "status": 400,
            "code": "task_not_supported",
            "param": "model",
        },
        "variation": {"kind": "BadRequestError", "status": 400, "code": "task_not_supported", "param": None},
        "key": {"kind": "AuthenticationError", "status": 401, "code": "unauthorized", "param": None},
    }
