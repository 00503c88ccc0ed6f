"""The routes of A1111's API, below ``/sdapi/v1``."""

from __future__ import annotations

from typing import Final

from giornata_gateway.http import a1111
from giornata_gateway.http.routes import GET, JSON, ONCE, POST, Reply, Route
from giornata_gateway.intake.rules.a1111.forms import ImageToImage, Settings, TextToImage
from giornata_gateway.views import a1111 as views

_SKIP: Final = {
    "name": "skip_current_image",
    "in": "query",
    "schema": {"type": "boolean"},
    "description": "Sent by A1111's clients; `current_image` is always null.",
}

A1111_ROUTES: Final = (
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
        GET, "/sdapi/v1/sd-models", a1111.models, "a1111Models", "A1111: served models.",
        {200: Reply("Served models.", {JSON: views.StableDiffusionModels})}, (401,), basic=True,
    ),
    Route(
        GET, "/sdapi/v1/samplers", a1111.samplers, "a1111Samplers", "A1111: samplers that served models take.",
        {200: Reply("By name.", {JSON: views.SamplerItems})}, (401,), basic=True,
    ),
    Route(
        GET, "/sdapi/v1/loras", a1111.loras, "a1111Loras", "A1111: LoRAs that the tenant may use.",
        {200: Reply("The newest first.", {JSON: views.LoraItems})}, (401, 503), basic=True,
    ),
    Route(
        GET, "/sdapi/v1/options", a1111.options, "a1111Options", "A1111: what requests stand for.",
        {200: Reply("Options.", {JSON: views.Options})}, (401,), basic=True,
    ),
    Route(
        POST, "/sdapi/v1/options", a1111.set_options, "a1111SetOptions",
        "A1111: accept options that are as they stand; none are kept.",
        {200: Reply("They are.", {JSON: views.Nothing})}, (400, 401, 403, 408, 413, 429),
        json_body=Settings, basic=True,
    ),
)  # fmt: skip
"""A1111's API; served where the gateway's `a1111` says so."""
