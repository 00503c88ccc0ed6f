"""OpenAI's packages for Python and for Node ask the same of a stack of the model that ships, and are told the same."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai.types import ImagesResponse

from tests.e2e.dialects import ALICE, shipped
from tests.e2e.live import LiveStack
from tests.e2e.pictures import Pixels, box, file, pixels, scene

NODE = Path(__file__).parent / "node"
INSTALL_S = 120


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, pace: Path) -> Iterator[LiveStack]:
    with shipped(tmp_path_factory.mktemp("shipped"), pace) as live:
        yield live


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the client and the locked version of OpenAI's package; skips without Node or without a registry."""
    missing = [program for program in ("node", "npm") if shutil.which(program) is None]
    if missing:
        pytest.skip(f"missing: {', '.join(missing)}; apt-get install -y nodejs npm")
    folder = tmp_path_factory.mktemp("node")
    for name in ("package.json", "package-lock.json", "client.mjs"):
        shutil.copy(NODE / name, folder)
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm has not installed OpenAI's package in {INSTALL_S} s")
    if done.returncode:
        pytest.skip(f"npm cannot install OpenAI's package: {done.stderr[-300:]}")
    return folder


async def by_node(stack: LiveStack, package: Path) -> dict[str, Any]:
    (package / "image.png").write_bytes(file(scene()))
    (package / "mask.png").write_bytes(file(box()))
    process = await asyncio.create_subprocess_exec(
        "node", "client.mjs", f"{stack.url}/v1", ALICE, "image.png", "mask.png",
        cwd=package, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    told: dict[str, Any] = json.loads(output)
    return told


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


async def test_both_packages_are_told_the_same(package: Path, stack: LiveStack) -> None:
    told, picture = await by_node(stack, package), await by_python(stack)
    ImagesResponse.model_validate(told["answer"], strict=True)
    same = decoded(told["answer"]["data"][0]["b64_json"])
    assert np.abs(same.astype(int) - picture).max() <= 2
    assert (picture[:8] == scene()[:8]).all()
    assert told["models"] == ["tiny"]

    kinds = [event["type"] for event in told["events"]]
    assert kinds.count("image_edit.partial_image") == 1
    assert kinds[-1] == "image_edit.completed"
    assert np.abs(decoded(told["events"][-1]["b64_json"]).astype(int) - picture).max() <= 2

    assert told["refused"] == {
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
