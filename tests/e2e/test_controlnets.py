"""ControlNets from a folder that a denoiser serves to a picture, through both doors."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from diffusers import FluxControlNetModel, FluxTransformer2DModel

import giornata.client
from giornata.wire.errors import ControlNetNotFound
from giornata.wire.workers import ServiceName
from tests.e2e.live import LiveStack, live_stack
from tests.e2e.pictures import box, file, pixels, scene

HOW: dict[str, Any] = {"prompt": "a red hat", "num_inference_steps": 4, "seed": 7, "reuse": "off"}
EDGES = {"model": "edges", "image": 0}


def save_net(model: Path, folder: Path, *, pixels: bool = False) -> None:
    """A random ControlNet for the Flux checkpoint `model`; one of `pixels` embeds them itself."""
    config = FluxTransformer2DModel.load_config(model, subfolder="transformer")
    kept = (
        "attention_head_dim", "num_attention_heads", "joint_attention_dim", "pooled_projection_dim",
        "guidance_embeds", "axes_dims_rope",
    )  # fmt: skip
    kind: Any = FluxControlNetModel
    torch.manual_seed(1)
    net = kind(
        in_channels=config["out_channels"],
        num_layers=1,
        num_single_layers=1,
        **{name: config[name] for name in kept},
        patch_size=2 if pixels else 1,
        conditioning_embedding_channels=config["out_channels"] // 4 if pixels else None,
    )
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if name.startswith("controlnet_"):  # zeros before training
                weight.normal_(0, 0.3)
    net.save_pretrained(folder)


@pytest.fixture(scope="module")
def controlled(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    folder = tmp_path_factory.mktemp("controlnets") / "edges"
    save_net(tiny_model, folder)
    save_net(tiny_model, folder.with_name("hint"), pixels=True)
    env = {ServiceName.DENOISER: {"GIORNATA_CONTROLNETS": f"{folder},sees_pixels={folder.with_name('hint')}"}}
    with live_stack(tiny_model, env_of=env) as live:
        yield live


@pytest.fixture
async def http(controlled: LiveStack) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(controlled.url) as session:
        yield session


async def edited(
    http: aiohttp.ClientSession, *controls: dict[str, object], **fields: object
) -> np.ndarray[Any, Any]:
    form = aiohttp.FormData()
    files = {"image": file(scene()), "mask": file(box())}
    if any("image" in control for control in controls):
        files["control_image_0"] = file(box())
    for name, data in files.items():
        form.add_field(name, data, filename=f"{name}.png", content_type="image/png")
    for name, value in {**HOW, "controlnets": json.dumps(controls), **fields}.items():
        form.add_field(name, str(value))
    async with http.post("/v1/images/edits", data=form) as answer:
        body = await answer.json()
        assert answer.status == 200, body
    return pixels(base64.b64decode(body["data"][0]["b64_json"])).astype(int)


async def test_an_edit_follows_its_control_image(http: aiohttp.ClientSession, controlled: LiveStack) -> None:
    async with http.get("/v1/models") as answer:
        (told,) = (await answer.json())["data"]
    assert told["controlnets"] == [{"name": "edges", "modes": 0}, {"name": "sees_pixels", "modes": 0}]
    # a control image is drawn from its posterior before the noise, so without one a seed makes another picture
    idle = EDGES | {"scale": 0}
    under, again, half, none, unseen, annotated = [
        await edited(http, EDGES | control)
        for control in ({}, {}, {"end": 0.5}, idle, idle | {"annotator": "canny"}, {"annotator": "canny"})
    ]
    assert (under == again).all()
    assert np.abs(unseen - none).max() <= 1
    differing = {"half": half, "annotated": annotated, "none": none}
    differing["reusing"] = (
        await edited(http, idle, reuse="auto") + under - await edited(http, EDGES, reuse="auto")
    )
    effects = {name: int(np.abs(one - under).max()) for name, one in differing.items()}
    assert min(effects.values()) > 8, effects
    seen, idle_seen = [
        await edited(http, {"model": "edges", "annotator": "soft_edge", "scale": scale}) for scale in (1, 0)
    ]
    assert np.abs(seen - idle_seen).max() > 8
    async with giornata.client.connect(controlled.nats_url) as client:
        asked: dict[str, Any] = {
            "image": file(scene()),
            "mask": file(box()),
            "control_image": [file(box())],
            **HOW,
        }
        result = await (await client.edit(controlnets=[EDGES], **asked))
        assert (pixels(result.pictures[0].data).astype(int) == under).all()
        with pytest.raises(ControlNetNotFound, match="edges"):
            await client.edit(controlnets=[EDGES | {"model": "depth"}], **asked)


async def test_a_controlnet_that_embeds_pixels_itself_sees_them(http: aiohttp.ClientSession) -> None:
    """XLabs trains such ones.

    No latents are drawn of its image, so that a seed makes the picture that it makes without.
    """
    plain, idle, under = [
        await edited(http, *({"model": "sees_pixels", "image": 0, "scale": scale} for scale in scales))
        for scales in ((), (0,), (1,))
    ]
    assert np.abs(idle - plain).max() <= 1
    assert np.abs(under - plain).max() > 8


async def test_a_service_computes_for_a_denoiser_without_any(
    tiny_model: Path, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    """The picture is the one of the denoiser that has the ControlNet itself."""
    save_net(tiny_model, tmp_path / "edges")
    env = {ServiceName.CONTROLNET: {"GIORNATA_CONTROLNETS": str(tmp_path / "edges")}}
    alone = await edited(http, EDGES)
    with live_stack(tiny_model, {ServiceName.CONTROLNET: 1}, env_of=env) as live:
        async with aiohttp.ClientSession(live.url) as served:
            under = await edited(served, EDGES)
        await live.until(lambda fleet: [s.control.steps_total for s in fleet.all() if s.control] == [4])
    assert np.abs(under - alone).max() <= 1
