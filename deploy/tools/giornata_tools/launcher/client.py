"""The demo as a user of the REST API: one streamed edit, and what the API tells of it afterwards."""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import aiohttp
from pydantic import BaseModel, TypeAdapter

from giornata.wire.times import StageTimes
from giornata_tools.launcher.process import LaunchError
from giornata_tools.launcher.report import Instance

SILENCE_S: Final = 60.0
"""A gateway that says nothing for so long is gone: it comments on a quiet stream every 15 s."""
Session = aiohttp.ClientSession
Progress = Callable[[str, int, int], None]
"""Told (state, step, steps); step and steps are 0 until the first step is done."""


@dataclass(frozen=True)
class Edited:
    """The outcome of one edit."""

    job_id: str
    picture: bytes
    """As it was sent: a PNG file."""
    latency_s: float
    """From sending the request to having the picture."""


class JobStatus(BaseModel):
    """What the demo reads of ``GET /v1/jobs/{id}``."""

    model: str
    steps: int
    mask_ratio: float
    stage_ms: StageTimes


@dataclass(frozen=True)
class Answer:
    """One edit, and what the system measured of it."""

    edited: Edited
    status: JobStatus


@asynccontextmanager
async def session(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    """Requests to the gateway at `url`.

    Raises:
        LaunchError: it stopped answering.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S)  # the gateway keeps the edit's time
    try:
        async with aiohttp.ClientSession(url, timeout=timeout) as opened:
            yield opened
    except (aiohttp.ClientError, TimeoutError) as error:
        raise LaunchError(f"The gateway stopped answering: {str(error) or type(error).__name__}.") from error


async def ask(
    session: aiohttp.ClientSession,
    image: bytes,
    mask: bytes,
    fields: Mapping[str, object],
    progress: Progress,
) -> Answer:
    """One edit, and what was measured; arguments and errors as of :func:`edit`."""
    edited = await edit(session, image, mask, fields, progress)
    return Answer(edited, await status(session, edited.job_id))


async def edit(
    session: aiohttp.ClientSession,
    image: bytes,
    mask: bytes,
    fields: Mapping[str, object],
    progress: Progress,
) -> Edited:
    """``POST /v1/images/edits`` with ``stream=true``.

    Args:
        session: with the gateway as its base URL.
        image: a PNG file.
        mask: likewise, white where to edit.
        fields: the form's other fields.
        progress: told of every state and step.

    Raises:
        LaunchError: the edit was refused or failed; the sentence is the server's.
    """
    form = aiohttp.FormData()
    form.add_field("image", image, filename="input.png", content_type="image/png")
    form.add_field("mask", mask, filename="mask.png", content_type="image/png")
    for name, value in {**fields, "stream": "true"}.items():
        form.add_field(name, str(value))
    started_s = time.monotonic()
    async with session.post("/v1/images/edits", data=form) as response:
        if response.status != HTTPStatus.OK:
            raise LaunchError(f"The gateway refused the edit with {response.status}: {await response.text()}")
        async for kind, data in events(response.content):
            if kind == "error":
                raise LaunchError(f"The edit failed: {data['error']['message']}")
            if kind == "image_edit.progress":
                progress(data["state"], data.get("step", 0), data.get("steps", 0))
            if kind == "image_edit.completed":
                return Edited(
                    data["job_id"], base64.b64decode(data["b64_json"]), time.monotonic() - started_s
                )
    raise LaunchError("The gateway ended the stream without a picture.")


async def status(session: aiohttp.ClientSession, job_id: str) -> JobStatus:
    """What the system measured of a job."""
    async with session.get(f"/v1/jobs/{job_id}") as response:
        response.raise_for_status()
        return JobStatus.model_validate_json(await response.read())


async def fleet(session: aiohttp.ClientSession) -> list[Instance]:
    """Every living instance."""
    async with session.get("/v1/fleet") as response:
        response.raise_for_status()
        return TypeAdapter(list[Instance]).validate_python((await response.json())["instances"])


async def events(content: aiohttp.StreamReader) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Server-sent events as (type, JSON object): section 9.2 of the HTML standard, as JSON needs it."""
    kind, data = "", ""
    pending = b""
    async for chunk in content.iter_any():
        *lines, pending = (pending + chunk).split(b"\n")
        for line in map(bytes.decode, lines):
            name, _, value = line.partition(":")
            if name == "event":
                kind = value.strip()
            elif name == "data":
                data += value
            elif not line and data:
                yield kind, TypeAdapter(dict[str, Any]).validate_json(data)
                kind, data = "", ""
