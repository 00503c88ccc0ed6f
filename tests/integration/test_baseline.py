"""The baseline server: pictures of diffusers' own pipeline, in batches of requests that are alike."""

from __future__ import annotations

import asyncio
import base64
import io
import re
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionInpaintPipeline, UNet2DConditionModel
from PIL import Image
from transformers import CLIPTextConfig, CLIPTextModel

from giornata.families import Family, read_model_card
from giornata_tools.baseline.batching import Rule
from giornata_tools.baseline.pipeline import Alike, Pipeline, PipelineRow
from giornata_tools.baseline.server import Baseline, Paints, serving
from giornata_tools.checkout import TRAINED
from giornata_tools.cli.bench.run import BenchPlan, Target, run
from giornata_tools.launcher.demo.oracle import PIPELINES
from giornata_tools.loadgen.images_api import Api
from giornata_tools.loadgen.masks import mask, mask_file
from giornata_tools.loadgen.pictures import generated
from giornata_tools.loadgen.schedule import OfferedLoad
from giornata_tools.loadgen.workload import MaskShape, Request
from giornata_tools.model.random.build import build
from giornata_tools.model.tokenizers import clip_tokenizer

SIZE = (64, 48)
FOREVER_S = 3600.0
PICTURES = [generated(*SIZE, seed) for seed in range(3)]
MASKS = [mask(*SIZE, 0.2, MaskShape.BLOB, seed) for seed in range(3)]


@dataclass
class Painter:
    """A pipeline that paints grey at once, or when it may; knows what it was asked."""

    name: str = "grey"
    calls: list[tuple[int, Alike]] = field(default_factory=list)
    began: threading.Event = field(default_factory=threading.Event)
    may: threading.Event = field(default_factory=threading.Event)
    failing: set[str] = field(default_factory=set)

    def paint(self, rows: Sequence[PipelineRow], alike: Alike) -> list[Image.Image]:
        self.calls.append((len(rows), alike))
        self.began.set()
        self.may.wait()
        if self.failing & {row.prompt for row in rows}:
            raise RuntimeError("out of memory")
        return [Image.new("L", (alike.width, alike.height), row.seed % 256) for row in rows]


@pytest.fixture
def painter() -> Painter:
    painter = Painter()
    painter.may.set()
    return painter


@contextmanager
def held(painter: Painter) -> Iterator[None]:
    """It paints nothing while inside; a test that fails there leaves no thread that waits."""
    painter.may.clear()
    try:
        yield
    finally:
        painter.may.set()


@asynccontextmanager
async def served(pipeline: Paints, rule: Rule, most: int = 100) -> AsyncIterator[aiohttp.ClientSession]:
    baseline = Baseline(pipeline, rule, most)
    async with (
        serving(baseline, pipeline.name, "127.0.0.1", 0) as url,
        aiohttp.ClientSession(url) as http,
    ):
        yield http


def form(number: int = 0, **fields: str) -> aiohttp.FormData:
    made = aiohttp.FormData()
    made.add_field("image", io.BytesIO(PICTURES[number]), filename="image.png")
    made.add_field("mask", io.BytesIO(mask_file(MASKS[number])), filename="mask.png")
    for name, value in {"prompt": f"hat {number}", "seed": str(number), **fields}.items():
        made.add_field(name, value)
    return made


async def edited(http: aiohttp.ClientSession, number: int = 0, **fields: str) -> tuple[int, dict[str, Any]]:
    async with http.post("/v1/images/edits", data=form(number, **fields)) as response:
        return response.status, await response.json()


async def refusal(http: aiohttp.ClientSession, fields: dict[str, str]) -> tuple[int, str, str | None]:
    status, body = await edited(http, 0, **fields)
    return status, body["error"]["code"], body["error"]["param"]


def pixels(body: dict[str, Any], index: int = 0) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(body["data"][index]["b64_json"]))))


@pytest.mark.parametrize("family", list(Family))
async def test_a_batch_is_the_pipelines_own(family: Family, tmp_path: Path) -> None:
    build(family, tmp_path / "tiny", seed=0)
    pipeline = Pipeline(str(tmp_path / "tiny"), torch.device("cpu"), torch.float32)
    async with served(pipeline, Rule(3, FOREVER_S)) as http:
        answers = [
            body
            for _, body in await asyncio.gather(
                *(edited(http, number, num_inference_steps="2", strength="0.8") for number in range(3))
            )
        ]
    assert [body["static_batching"][0]["batch"] for body in answers] == [3, 3, 3]
    own = PIPELINES[family].from_pretrained(tmp_path / "tiny", dtype=torch.float32)
    own.set_progress_bar_config(disable=True)
    order = sorted(range(3), key=lambda number: answers[number]["static_batching"][0]["place"])
    expected = own(
        prompt=[f"hat {number}" for number in order],
        image=[Image.open(io.BytesIO(PICTURES[number])) for number in order],
        mask_image=[Image.fromarray(MASKS[number].astype(np.uint8) * np.uint8(255)) for number in order],
        width=SIZE[0],
        height=SIZE[1],
        generator=[torch.Generator().manual_seed(number) for number in order],
        **{**pipeline.defaults, "num_inference_steps": 2, "strength": 0.8},
    ).images
    for number, picture in zip(order, expected, strict=True):
        assert np.array_equal(pixels(answers[number]), np.asarray(picture))


async def test_what_is_not_said_is_as_giornata_serves_the_model() -> None:
    card = read_model_card(TRAINED)
    defaults = Pipeline(str(TRAINED), torch.device("cpu"), torch.float32).defaults
    assert defaults["num_inference_steps"] == card.default_steps
    assert defaults["guidance_scale"] == card.default_guidance_scale


def stable_diffusion(folder: Path) -> None:
    """A tiny checkpoint of a family that Giornata does not serve."""
    torch.manual_seed(0)
    kind: Any = UNet2DConditionModel
    unet = kind(
        sample_size=64,
        in_channels=4,
        block_out_channels=(32, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        norm_num_groups=8,
    )
    coder: Any = AutoencoderKL
    vae = coder(
        block_out_channels=(8,) * 4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        norm_num_groups=4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
    )
    text = CLIPTextModel(
        CLIPTextConfig(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            vocab_size=len(clip_tokenizer()),
            bos_token_id=0,
            eos_token_id=1,
        )
    )
    pipeline: Any = StableDiffusionInpaintPipeline
    made = pipeline(
        vae=vae,
        text_encoder=text,
        tokenizer=clip_tokenizer(),
        unet=unet,
        scheduler=DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    made.save_pretrained(folder, safe_serialization=True)


@pytest.mark.filterwarnings("ignore")  # diffusers imports every pipeline it has, and some of those warn
async def test_other_families_are_served_by_the_pipeline_that_diffusers_finds(tmp_path: Path) -> None:
    stable_diffusion(tmp_path / "tiny")
    pipeline = Pipeline(str(tmp_path / "tiny"), torch.device("cpu"), torch.float32)
    async with served(pipeline, Rule(2, FOREVER_S)) as http:
        status, body = await edited(http, n="2", num_inference_steps="2")
    assert (status, body["size"], pipeline.defaults) == (200, "64x48", {})
    assert not np.array_equal(pixels(body, 0), pixels(body, 1))


async def test_requests_that_differ_in_steps_are_not_one_batch(painter: Painter) -> None:
    async with served(painter, Rule(2, FOREVER_S)) as http:
        answers = await asyncio.gather(
            *(edited(http, num_inference_steps=steps, n="1") for steps in ("4", "8", "8", "4"))
        )
    assert [status for status, _ in answers] == [200] * 4
    assert sorted((rows, alike.steps) for rows, alike in painter.calls) == [(2, 4), (2, 8)]


async def test_pictures_of_a_request_have_seeds_of_their_own_and_fill_a_batch(painter: Painter) -> None:
    async with served(painter, Rule(3, FOREVER_S)) as http:
        status, body = await edited(http, n="3", seed="7")
    assert (status, [int(pixels(body, index)[0, 0]) for index in range(3)]) == (200, [7, 8, 9])
    assert (body["size"], len(painter.calls)) == ("64x48", 1)


async def test_a_batch_that_is_not_full_begins_after_the_window(painter: Painter) -> None:
    async with served(painter, Rule(8, 0.01)) as http:
        status, body = await edited(http)
    assert (status, body["static_batching"][0]["batch"]) == (200, 1)


async def test_who_comes_while_a_batch_is_computed_waits_for_the_next_or_is_refused(painter: Painter) -> None:
    async with served(painter, Rule(2, 0.0), most=3) as http:
        with held(painter):
            first = asyncio.ensure_future(edited(http, n="2"))
            await asyncio.to_thread(painter.began.wait)
            others = [asyncio.ensure_future(edited(http, n="2")) for _ in range(2)]
            [refused], _ = await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
            assert (refused.result()[0], refused.result()[1]["error"]["code"]) == (503, "queue_full")
        assert sorted(status for status, _ in await asyncio.gather(first, *others)) == [200, 200, 503]
    assert [rows for rows, _ in painter.calls] == [2, 2]


async def test_a_client_that_leaves_takes_its_rows_along(painter: Painter) -> None:
    async with served(painter, Rule(2, FOREVER_S)) as http:
        with pytest.raises(TimeoutError):
            await http.post("/v1/images/edits", data=form(), timeout=aiohttp.ClientTimeout(total=0.3))
        status, body = await edited(http, n="2", seed="9")
    assert (status, [one["seed"] for one in body["static_batching"]]) == (200, [9, 10])
    assert [rows for rows, _ in painter.calls] == [2]


async def test_a_batch_that_fails_is_told_and_the_next_goes_on(painter: Painter) -> None:
    painter.failing.add("poison")
    async with served(painter, Rule(2, 0.0)) as http:
        status, body = await edited(http, prompt="poison", n="2")
        assert (status, body["error"]["code"]) == (500, "internal_error")
        assert "out of memory" in body["error"]["message"]
        assert (await edited(http))[0] == 200


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt": ""}, (400, "invalid_field", "prompt")),
        ({"num_inference_steps": "0"}, (400, "invalid_field", "num_inference_steps")),
        ({"reuse": "off"}, (400, "unknown_field", "reuse")),
        ({"size": "8x8"}, (400, "invalid_field", "size")),
        ({"model": "other"}, (404, "model_not_found", "model")),
        ({"response_format": "url"}, (400, "invalid_field", "response_format")),
    ],
)
async def test_what_it_cannot_do_is_refused_by_name(
    painter: Painter, fields: dict[str, str], expected: tuple[int, str, str]
) -> None:
    async with served(painter, Rule(1, 0.0)) as http:
        assert await refusal(http, fields) == expected
    assert painter.calls == []


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({}, "invalid_field"),
        ({"image": b"text"}, "image_unreadable"),
        ({"image": PICTURES[0], "mask": PICTURES[0][:100]}, "image_unreadable"),
        ({"image": PICTURES[0], "mask": mask_file(np.zeros((48, 64), np.bool_))}, "mask_empty"),
        ({"image": PICTURES[0]}, "mask_empty"),
        ({"image": PICTURES[0], "mask": mask_file(np.ones((16, 16), np.bool_))}, "mask_size_mismatch"),
        ({"image": PICTURES[0], "lora": b"x"}, "invalid_field"),
    ],
)
async def test_files_that_do_not_do_are_refused(painter: Painter, files: dict[str, bytes], code: str) -> None:
    made = aiohttp.FormData({"prompt": "a hat"})
    for name, data in files.items():
        made.add_field(name, io.BytesIO(data), filename=name)
    async with served(painter, Rule(1, 0.0)) as http, http.post("/v1/images/edits", data=made) as response:
        body = await response.json()
    assert (response.status, body["error"]["code"]) == (400, code)


async def test_it_is_measured_as_any_server(painter: Painter, tmp_path: Path) -> None:
    requests = tuple(Request(0.0, number, 0.2, 4, 2, number, MaskShape.SQUARE) for number in range(3))
    async with served(painter, Rule(2, 0.0)) as http:
        asked_for = BenchPlan(
            targets=(Target("baseline", str(http._base_url)),),
            api=Api.GIORNATA,
            api_key=None,
            loads=(OfferedLoad(None, requests, 0.0, 1.0),),
            templates=None,
            size=SIZE,
            fields={"prompt": "a hat"},
            slo_s=None,
            in_flight=10,
            timeout_s=60.0,
            seed=0,
            out=tmp_path,
            options={},
        )
        assert await run(asked_for) == 0
    assert sum(rows for rows, _ in painter.calls) == 2 * (3 + 1)


async def test_the_program_serves_the_model_that_ships_until_it_is_told_to_stop() -> None:
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "giornata_tools.cli",
            "bench",
            "baseline",
            "--port",
            "0",
            "--window-ms",
            "0",
            "--torch-threads",
            "1",
        ),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        said = (await process.stdout.readline()).decode()
        [url] = re.findall(r"^fresco at (http://\S+): up to 8 pictures a batch$", said)
        async with aiohttp.ClientSession(url) as http:
            status, body = await edited(http, num_inference_steps="1")
            async with http.get("/v1/models") as response:
                [model] = (await response.json())["data"]
        assert (status, body["size"], model["id"]) == (200, "64x48", "fresco")
    finally:
        process.send_signal(signal.SIGINT)
        await process.communicate()
    assert process.returncode == 130
