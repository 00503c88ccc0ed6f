"""What tests of the baseline server share: pictures, a server of a pipeline, and requests."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
from PIL import Image

from giornata_lab.baseline.server import Baseline, BatchPolicy, serving
from giornata_lab.loadgen.driver import generated, mask, mask_file
from giornata_lab.loadgen.workload import MaskShape

SIZE = (64, 48)
FOREVER_S = 3600.0
PICTURES = [generated(*SIZE, seed) for seed in range(3)]
MASKS = [mask(*SIZE, 0.2, MaskShape.BLOB, seed) for seed in range(3)]


@asynccontextmanager
async def served(pipeline: Any, rule: BatchPolicy, most: int = 100) -> AsyncIterator[aiohttp.ClientSession]:
    baseline = Baseline(pipeline, rule, most)
    async with (
        serving(baseline, "127.0.0.1", 0) as url,
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


def pixels(body: dict[str, Any], index: int = 0) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(body["data"][index]["b64_json"]))))
