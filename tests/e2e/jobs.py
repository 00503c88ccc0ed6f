"""Edits over HTTP, answered at once; and jobs: submitted, followed, waited for, and their pictures."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping
from typing import Any, Final

import aiohttp

from giornata_lab.bench.systems.edit_forms import Pixels, pixels
from tests.patience import HUNG_S

WAIT_MS: Final = 60_000
"""The longest that a gateway lets one question wait."""


def form_of(files: Mapping[str, bytes], **fields: object) -> aiohttp.FormData:
    """A form of PNG files and texts."""
    form = aiohttp.FormData(default_to_multipart=True)
    for name, data in files.items():
        form.add_field(name, data, filename=f"{name}.png", content_type="image/png")
    for name, value in fields.items():
        form.add_field(name, str(value))
    return form


async def answered(
    http: aiohttp.ClientSession, path: str = "/v1/images/edits", **request: Any
) -> dict[str, Any]:
    """The answer to an edit or a generation that is carried out."""
    async with http.post(path, **request) as answer:
        body: dict[str, Any] = await answer.json()
        assert answer.status == 200, body
        return body


def first_picture(body: Mapping[str, Any]) -> Pixels:
    """Of such an answer."""
    return pixels(base64.b64decode(body["data"][0]["b64_json"]))


async def submit(http: aiohttp.ClientSession, form: aiohttp.FormData) -> str:
    """The path of an accepted job."""
    async with http.post("/v1/jobs", data=form) as answer:
        body = await answer.json()
        assert answer.status == 202, body
        return f"/v1/jobs/{body['id']}"


async def told(http: aiohttp.ClientSession, job: str) -> list[dict[str, Any]]:
    """Every event of a job, until it ends."""
    async with http.get(f"{job}/events") as answer:
        return [json.loads(line[6:]) async for line in answer.content if line.startswith(b"data: ")]


async def until_step(http: aiohttp.ClientSession, job: str, step: int) -> None:
    """Return when the job has computed `step` steps."""
    async with http.get(f"{job}/events") as answer:
        async for line in answer.content:
            if line.startswith(b"data: ") and (json.loads(line[6:]).get("step") or 0) >= step:
                return
    raise AssertionError("the job ended before that step")


async def ended(http: aiohttp.ClientSession, job: str, limit_s: float = HUNG_S) -> dict[str, Any]:
    """The job's status after its last event."""
    async with asyncio.timeout(limit_s):
        await told(http, job)
        async with http.get(job) as answer:
            status: dict[str, Any] = await answer.json()
            return status


async def settled(http: aiohttp.ClientSession, path: str) -> dict[str, Any]:
    """A LoRA or a template, once nothing more happens to it by itself."""
    told: dict[str, Any] = {"state": "asked"}
    async with asyncio.timeout(HUNG_S):
        while told.get("state") not in {"ready", "failed", None}:
            async with http.get(path, params={"wait_ms": WAIT_MS}) as answer:
                told = await answer.json()
    return told


async def completions(http: aiohttp.ClientSession, job: str) -> int:
    """How often the job was said to be completed."""
    return [event["type"] for event in await told(http, job)].count("image_edit.completed")


async def painted(http: aiohttp.ClientSession, job: str, index: int = 0) -> Pixels:
    """One of the job's pictures."""
    async with http.get(f"{job}/image", params={"index": index}) as answer:
        assert answer.status == 200
        return pixels(await answer.read())
