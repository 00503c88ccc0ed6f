"""Hooks of schemathesis: most ids in its requests become ids of records that exist.

Jobs, templates, LoRAs and webhooks are those that its own requests have made. Where too few are left, one is made here,
as a client would. An id that a link has brought stays as it is.
"""

from __future__ import annotations

import base64
import os
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import requests
import schemathesis

from giornata_gateway.http.resources import MAX_WAIT_MS
from tests.integration.lora_bench import lora
from tests.patience import HUNG_S
from tests.unit.prepost.files import saved

GATEWAY: Final = "GIORNATA_FUZZ_GATEWAY"
"""The variable with the gateway's address."""
RECEIVER: Final = "http://127.0.0.1:9/hook"
"""Takes no webhook, so that the webhooks of jobs are not forgotten."""
SHARE: Final = 0.8
"""Share of the ids that are exchanged."""
BRIEF_MS: Final = 20
FEWEST: Final = 4
"""Records of a kind; with fewer, one more is made."""
PICTURE: Final = saved(np.full((8, 12, 3), (255, 0, 0), np.uint8), "PNG")
"""Red, which is what the segmenter behind the gateway finds by that word."""
WRITTEN: Final = base64.b64encode(PICTURE).decode()
SCRIPTS: Final = {"controlnet": {"args": [{"model": "outline", "module": "canny", "image": WRITTEN}]}}
_draw: Final = random.SystemRandom()  # Hypothesis sets the others back for every example


def kind_of(path: str) -> str | None:
    """What the id in a path names: the part before it; None where there is none."""
    before, _, rest = path.removeprefix("/v1/").partition("/{")
    return before if rest else None


class Pool:
    """Ids that exist, by kind, and how to make another one."""

    def __init__(self, make: Mapping[str, Callable[[], str | None]]) -> None:
        self._make = make
        self._ids: defaultdict[str, list[str]] = defaultdict(list)
        self._seen: set[str] = set()

    def makes(self, kind: str) -> bool:
        """Whether it knows how to make a record of a kind."""
        return kind in self._make

    def add(self, kind: str, name: str) -> None:
        """A record has been made."""
        if name not in self._ids[kind]:
            self._ids[kind].append(name)
        self._seen.add(name)

    def drop(self, kind: str, name: str) -> None:
        """A record is gone."""
        if name in self._ids[kind]:
            self._ids[kind].remove(name)

    def exchanged(self, kind: str, name: object) -> str | None:
        """An id in place of `name`; None where that is, or was, one itself, or by chance."""
        if name in self._seen or _draw.random() >= SHARE:
            return None
        if len(self._ids[kind]) < FEWEST and (made := self._make[kind]()) is not None:
            self.add(kind, made)
        return _draw.choice(self._ids[kind]) if self._ids[kind] else None


def _made(path: str, **form: Any) -> str | None:
    answer = requests.post(os.environ[GATEWAY] + path, timeout=HUNG_S, **form)
    return str(answer.json()["id"]) if answer.ok else None


def _job(**fields: str) -> str | None:
    return _made("/v1/jobs", data={"prompt": "a hat", **fields}, files={"image": b"picture"})


def _picture() -> dict[str, bytes]:
    return {"image": _draw.randbytes(16)}


POOL: Final = Pool(
    {
        "jobs": _job,
        "webhooks": lambda: _job(webhook=RECEIVER),
        "templates": lambda: _made("/v1/templates", files=_picture()),
        "models": lambda: str(
            requests.get(f"{os.environ[GATEWAY]}/v1/models", timeout=HUNG_S).json()["data"][0]["id"]
        ),
        "loras": lambda: _made("/v1/loras", files={"file": lora(_draw.getrandbits(32))}),
    }
)


@schemathesis.hook
def before_call(_context: Any, case: Any, _kwargs: Any) -> None:
    """Exchange the id in the path, and a template's in the body; shorten waits that would be granted."""
    kind = kind_of(case.path)
    for name, value in list(case.path_parameters.items()) if kind else ():
        if (known := POOL.exchanged(kind or "", value)) is not None:
            case.path_parameters[name] = known
    wait_ms = str((case.query or {}).get("wait_ms"))
    if wait_ms.isdecimal() and BRIEF_MS < int(wait_ms[:9]) <= MAX_WAIT_MS:
        case.query["wait_ms"] = BRIEF_MS
    if isinstance(case.body, dict):
        if case.media_type == "multipart/form-data":  # a form has no null: it would be sent as a word
            case.body = {name: value for name, value in case.body.items() if value is not None}
        fill(case.path, case.body)


def fill(path: str, body: dict[str, Any]) -> None:
    """Exchange what random text never is: an id, a picture, words that name something, units of ControlNets."""
    if isinstance(body.get("template_id"), str):
        body["template_id"] = POOL.exchanged("templates", body["template_id"]) or body["template_id"]
    words = "prompt" if path == "/v1/masks" else "mask_prompt"
    written = path.startswith("/sdapi/")
    told = {"image": PICTURE, "init_images": [WRITTEN], words: "red", "alwayson_scripts": SCRIPTS}
    told |= {"mask": WRITTEN if written else PICTURE, "override_settings": {}}
    for name in told.keys() & body.keys():
        if _draw.random() < SHARE:
            body[name] = told[name]


@schemathesis.hook
def after_call(_context: Any, case: Any, response: Any) -> None:
    """Learn of records that were made, and that are gone."""
    kind = kind_of(case.path)
    name = str(next(iter(case.path_parameters.values()), ""))
    if kind and (response.status_code == requests.codes.not_found or case.method == "DELETE"):
        if kind != "jobs" or response.status_code == requests.codes.not_found:
            POOL.drop(kind, name)
    elif case.method == "POST" and 200 <= response.status_code < 300:
        told = _json(response)
        made = case.path.removeprefix("/v1/")
        if made in {"jobs", "templates", "loras"}:
            POOL.add(made, told["id"])
        elif "giornata" in told:
            POOL.add("jobs", told["giornata"]["job_id"])


def _json(response: Any) -> dict[str, Any]:
    plain = response.headers.get("content-type", [""])[0].startswith("application/json")
    told = response.json() if plain else {}
    return told if isinstance(told, dict) else {}
