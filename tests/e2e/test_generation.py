"""Pictures from text through every service: HTTP, NATS, OpenAI's client and the command line, beside an edit."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np
import openai
import pytest
import torch
import webuiapi
from diffusers import FluxPipeline

from giornata.client import connect
from giornata.model_cards import read_model_card
from giornata_lab.bench.systems.edit_forms import Pixels, edit_form, pixels
from tests import comfyui_nodes
from tests.e2e.jobs import answered
from tests.e2e.live import LiveStack
from tests.e2e.node_package import told
from tests.e2e.test_cli import door, giornata

ASKED: Final[dict[str, Any]] = {
    "prompt": "a red barn",
    "size": "128x96",
    "seed": 7,
    "num_inference_steps": 3,
    "true_cfg_scale": 2.0,
    "negative_prompt": "snow",
}


@pytest.fixture(scope="module")
def expected(generating_model: Path) -> Pixels:
    """What the family's text-to-image pipeline makes of the same."""
    pipeline: Any = FluxPipeline.from_pretrained(
        generating_model, use_safetensors=True, local_files_only=True
    )
    pipeline.set_progress_bar_config(disable=True)
    (picture,) = pipeline(
        ASKED["prompt"],
        negative_prompt=ASKED["negative_prompt"],
        true_cfg_scale=ASKED["true_cfg_scale"],
        num_inference_steps=ASKED["num_inference_steps"],
        guidance_scale=3.5,
        width=128,
        height=96,
        max_sequence_length=read_model_card(generating_model).max_text_tokens,
        generator=torch.Generator().manual_seed(ASKED["seed"]),
    ).images
    return np.asarray(picture)


def test_comfyuis_node_makes_what_the_pipeline_makes(
    pairs: LiveStack, expected: Pixels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIORNATA_URL", pairs.url)
    asked = {"prompt": "a red barn", "negative_prompt": "snow", "true_cfg_scale": 2.0}
    made = comfyui_nodes.run("GiornataGenerate", width=128, height=96, seed=7, steps=3, batch_size=2, **asked)
    assert made.shape == (2, 96, 128, 3)
    assert np.abs(made[0].numpy() * 255 - expected).max() <= 1
    assert (made[0] != made[1]).any()


def test_a1111s_client_makes_what_the_pipeline_makes(pairs: LiveStack, expected: Pixels) -> None:
    host, port = pairs.url.removeprefix("http://").split(":")
    client = webuiapi.WebUIApi(host=host, port=int(port))
    with client.session:
        answer = client.txt2img(
            prompt="a red barn", negative_prompt="snow", cfg_scale=2, width=128, height=96, seed=7, steps=3
        )
    assert np.abs(np.asarray(answer.image).astype(int) - expected).max() <= 1
    assert (answer.info["all_seeds"], answer.info["denoising_strength"]) == ([7], None)


def same(file: bytes, expected: Pixels) -> bool:
    """Whether a file shows the picture, to a level of each pixel."""
    found = pixels(file)
    return found.shape == expected.shape and bool(
        (np.abs(found.astype(int) - expected.astype(int)) <= 1).all()
    )


@pytest.mark.long
async def test_both_doors_and_openais_client_make_what_the_pipeline_makes(
    pairs: LiveStack, expected: Pixels
) -> None:
    async with aiohttp.ClientSession(pairs.url) as http:
        form = edit_form(num_inference_steps=20)
        edit = asyncio.create_task(answered(http, data=form))  # its row is in the same batches
        body = await answered(http, "/v1/images/generations", json=ASKED)
        await edit
    assert same(base64.b64decode(body["data"][0]["b64_json"]), expected)
    assert (body["size"], body["giornata"]["steps"], body["giornata"]["template"]) == ("128x96", 3, ["off"])
    assert body["giornata"]["computed_tokens"] == [body["usage"]["output_tokens"]]
    async with connect(pairs.nats_url) as client:
        result = await (await client.generate(**ASKED, n=2))
    assert (result.width, result.height) == (128, 96)
    assert same(result.pictures[0].data, expected)
    assert not same(result.pictures[1].data, expected)
    ours = {name: value for name, value in ASKED.items() if name not in {"prompt", "size"}}
    async with openai.AsyncOpenAI(base_url=f"{pairs.url}/v1", api_key="none", max_retries=0) as bought:
        stream = await bought.images.generate(
            prompt=ASKED["prompt"], size=ASKED["size"], stream=True, partial_images=1, extra_body=ours
        )
        events: list[Any] = [event async for event in stream]
    assert [one.type for one in events if "partial" in one.type] == ["image_generation.partial_image"]
    assert same(base64.b64decode(events[-1].b64_json), expected)


@pytest.mark.long
async def test_openais_package_for_node_makes_the_same(
    pairs: LiveStack, package: Path, expected: Pixels
) -> None:
    answer = await told(package, "generate.mjs", f"{pairs.url}/v1", json.dumps(ASKED))
    assert same(base64.b64decode(answer["data"][0]["b64_json"]), expected)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["http", "nats"])
async def test_the_command_line_makes_the_same(
    pairs: LiveStack, expected: Pixels, tmp_path: Path, kind: str
) -> None:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in ASKED.items()]
    status, _, err = await giornata("generate", *options, "-o", "made.png", *door(pairs, kind), cwd=tmp_path)
    assert (status, "made.png: 128x96, seed 7" in err) == (0, True), err
    assert same((tmp_path / "made.png").read_bytes(), expected)
