"""The routes of A1111's API, below ``/sdapi/v1``, and of its ControlNet extension, below ``/controlnet``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from pydantic import BaseModel, RootModel

from giornata_gateway.fleet import FleetListener
from giornata_gateway.http import a1111
from giornata_gateway.http.body import JSON
from giornata_gateway.http.routes import GET, ONCE, POST, Body, Reply, Route
from giornata_gateway.intake.rules.a1111.forms import ImageToImage, Settings, TextToImage
from giornata_gateway.intake.rules.a1111.units import MODULES
from giornata_gateway.views import a1111 as views

_SKIP: Final = {
    "name": "skip_current_image",
    "in": "query",
    "schema": {"type": "boolean"},
    "description": "Sent by A1111's clients; `current_image` is always null.",
}
FIXED: Final[Mapping[str, Any]] = {
    "/sdapi/v1/cmd-flags": {"api": True, "nowebui": True},
    "/sdapi/v1/upscalers": [
        {"name": "None", "model_name": None, "model_path": None, "model_url": None, "scale": 1}
    ],
    "/sdapi/v1/latent-upscale-modes": [],
    "/sdapi/v1/sd-vae": [],
    "/sdapi/v1/memory": {"ram": {"error": "unavailable"}, "cuda": {"error": "unavailable"}},
    "/controlnet/version": {"version": 2},
    "/controlnet/module_list": {
        "module_list": list(MODULES),
        "module_detail": {name: {"model_free": False, "sliders": []} for name in MODULES},
    },
}
"""Answers that are always the same, in A1111's forms. A gateway's memory says nothing about that of workers."""

LISTED: Final[Mapping[str, tuple[type[BaseModel], Callable[[FleetListener], BaseModel]]]] = {
    "/sdapi/v1/sd-models": (views.StableDiffusionModels, lambda fleet: views.models(fleet.cards())),
    "/sdapi/v1/samplers": (views.SamplerItems, lambda fleet: views.samplers(fleet.cards())),
    "/sdapi/v1/schedulers": (views.SchedulerItems, lambda fleet: views.schedulers(fleet.cards())),
    "/sdapi/v1/options": (views.Options, lambda fleet: views.options(fleet.cards())),
    "/controlnet/model_list": (views.ControlModels, lambda fleet: views.control_models(fleet.controlnets())),
}
"""Answers that tell what is served."""


def _listing(path: str, view: Callable[[FleetListener], BaseModel], schema: Body, summary: str) -> Route:
    words = re.split(r"[/_-]", path.removeprefix("/").removeprefix("sdapi/v1/").removeprefix("sd-"))
    name, reply = f"a1111{''.join(map(str.title, words))}", Reply("In A1111's form.", {JSON: schema})
    return Route(GET, path, a1111.telling(view), name, f"A1111: {summary}.", {200: reply}, (401,), basic=True)


def _fixed(path: str, answer: Any) -> Route:
    return _listing(path, lambda _: RootModel[Any](answer), {"const": answer}, "the same for all")


A1111_ROUTES: Final = (
    *(_listing(path, view, kind, "what is served") for path, (kind, view) in LISTED.items()),
    *(_fixed(path, answer) for path, answer in FIXED.items()),
    Route(
        POST, "/sdapi/v1/txt2img", a1111.txt2img, "a1111TextToImage", "A1111: make pictures from text.",
        {200: Reply("Made.", {JSON: views.PaintedAnswer})}, ONCE, json_body=TextToImage, basic=True,
    ),
    Route(
        POST, "/sdapi/v1/img2img", a1111.img2img, "a1111ImageToImage", "A1111: edit a picture.",
        {200: Reply("Edited.", {JSON: views.PaintedAnswer})}, ONCE, json_body=ImageToImage, basic=True,
    ),
    Route(
        GET, "/sdapi/v1/progress", a1111.progress, "a1111Progress",
        "A1111: how far the oldest of the tenant's jobs is that A1111's requests wait for at this gateway.",
        {200: Reply("Its progress.", {JSON: views.ProgressView})}, (400, 401, 503), (_SKIP,), basic=True,
    ),
    Route(
        POST, "/sdapi/v1/interrupt", a1111.interrupt, "a1111Interrupt",
        "A1111: cancel the tenant's jobs that A1111's requests wait for at this gateway.",
        {200: Reply("They end at their next step.", {JSON: views.Nothing})}, (401, 403, 503), basic=True,
    ),
    Route(
        POST, "/sdapi/v1/skip", a1111.skip, "a1111Skip",
        "A1111: cancel the oldest of the tenant's jobs that A1111's requests wait for at this gateway.",
        {200: Reply("It ends at its next step.", {JSON: views.Nothing})}, (401, 403, 503), basic=True,
    ),
    Route(
        POST, "/sdapi/v1/refresh-checkpoints", a1111.telling(lambda _: views.Nothing()), "a1111RefreshCheckpoints",
        "A1111: nothing, since lists tell what is served now.",
        {200: Reply("Done.", {JSON: views.Nothing})}, (401, 403), basic=True,
    ),
    Route(
        GET, "/sdapi/v1/loras", a1111.loras, "a1111Loras", "A1111: LoRAs that the tenant may use.",
        {200: Reply("The newest first.", {JSON: views.LoraItems})}, (401, 503), basic=True,
    ),
    Route(
        POST, "/sdapi/v1/options", a1111.set_options, "a1111SetOptions",
        "A1111: accept options that are as they stand; none are kept.",
        {200: Reply("They are.", {JSON: views.Nothing})}, (400, 401, 403, 408, 413, 429),
        json_body=Settings, basic=True,
    ),
)  # fmt: skip
"""A1111's API; served where the gateway's `a1111` says so."""
