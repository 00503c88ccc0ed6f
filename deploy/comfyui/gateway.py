"""One edit over HTTP, from its form to its picture."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import requests

DEFAULT_URL: Final = "http://127.0.0.1:8000"
CONNECT_S: Final = 10.0
SILENT_S: Final = 60.0
"""Longest silence of an event stream; a gateway says every few seconds that it is there."""
PIECE_BYTES: Final = 1 << 20
"""As a gateway writes a large event; a smaller one is read as it comes."""

Told = Callable[[int, int], None]
"""Is told the steps that are done and all of them, now and then; it may raise to give the edit up."""


class EditError(RuntimeError):
    """The gateway has not edited the picture."""


def edit(image: bytes, mask: bytes, fields: Mapping[str, Any], told: Told) -> bytes:
    """The edited picture; leaving early cancels the edit.

    The gateway and its key are those of the environment (`GIORNATA_URL`, `GIORNATA_API_KEY`), not of the workflow:
    ComfyUI writes a workflow into every picture that it saves, and a stranger's must not name where a key is sent.

    Raises:
        EditError: it is not reached, or refuses the edit; says why.
    """
    url = os.environ.get("GIORNATA_URL", DEFAULT_URL).rstrip("/")
    key = os.environ.get("GIORNATA_API_KEY")
    try:
        with requests.post(
            f"{url}/v1/images/edits",
            data={**fields, "stream": "true", "output_format": "png"},
            files={"image": ("image.png", image, "image/png"), "mask": ("mask.png", mask, "image/png")},
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=(CONNECT_S, SILENT_S),
            stream=True,
        ) as answer:
            return _picture(answer, told)
    except requests.RequestException as error:
        raise EditError(f"The gateway at {url} does not answer: {error}") from error


def _picture(answer: requests.Response, told: Told) -> bytes:
    if not answer.ok:
        raise EditError(_why(answer))
    done, steps = 0, 0
    for event in _events(answer):
        if event is not None and "error" in event:
            raise EditError(_sentence(event["error"]))
        if event is not None and event.get("b64_json") and event["type"].endswith(".completed"):
            return base64.b64decode(event["b64_json"])
        if event is not None and event.get("step"):
            done, steps = event["step"], event["steps"]
        told(done, steps)
    raise EditError("The gateway ended its answer without a picture.")


def _events(answer: requests.Response) -> Iterator[dict[str, Any] | None]:
    """The data of server-sent events, and None for the comments between them."""
    for line in answer.iter_lines(chunk_size=PIECE_BYTES):
        if line.startswith(b"data: "):
            yield json.loads(line[6:])
        elif line.startswith(b":"):
            yield None


def _why(answer: requests.Response) -> str:
    try:
        return _sentence(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP status {answer.status_code}"


def _sentence(error: Mapping[str, Any]) -> str:
    names = ("param", "received", "accepted")
    return " ".join([error["message"], *(f"{name}: {error[name]}." for name in names if error.get(name))])
