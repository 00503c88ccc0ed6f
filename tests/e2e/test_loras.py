"""A LoRA from its upload to a picture, through both doors."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from diffusers import FluxFillPipeline
from safetensors.torch import save
from torch import Tensor

import giornata.client
from giornata.wire.errors import GiornataError
from giornata.wire.loras import LoraRecord
from giornata.wire.subjects import NatsRole
from giornata_lab.bench.systems.edit_forms import box, edit_form, file, pixels, scene
from giornata_tools.lora_profiler.probes import scenes
from giornata_tools.lora_profiler.profiler import LoraProfile, ProbeSetting, ProfilerLogin, connected
from tests.e2e.jobs import answered, first_picture, settled
from tests.e2e.live import LiveStack

LAYERS = (
    "transformer_blocks.0.attn.to_q",
    "transformer_blocks.0.norm1.linear",
    "single_transformer_blocks.0.proj_out",
)


@pytest.fixture(scope="module")
def lora(tiny_model: Path) -> bytes:
    """A file of rank 4 that changes pictures much."""
    return drawn(tiny_model, 0.5)


@pytest.fixture(scope="module")
def faint(tiny_model: Path) -> bytes:
    """One that changes them so little that it may join late."""
    return drawn(tiny_model, 0.02)


def drawn(tiny_model: Path, size: float) -> bytes:
    """As `save_lora_weights` names tensors."""
    weights = transformer_weights(tiny_model)
    draw = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for layer in LAYERS:
        out_features, in_features = weights[f"{layer}.weight"].shape
        tensors[f"transformer.{layer}.lora_A.weight"] = size * torch.randn(4, in_features, generator=draw)
        tensors[f"transformer.{layer}.lora_B.weight"] = size * torch.randn(out_features, 4, generator=draw)
    return save(tensors)


def transformer_weights(model: Path) -> dict[str, Tensor]:
    pipeline = FluxFillPipeline.from_pretrained(model, dtype=torch.float32)
    return dict(pipeline.transformer.state_dict())


async def uploaded(http: aiohttp.ClientSession, lora: bytes) -> str:
    form = aiohttp.FormData(default_to_multipart=True)
    form.add_field("file", io.BytesIO(lora), filename="drawn.safetensors")
    async with http.post("/v1/loras", data=form) as answer:
        told = await answer.json()
        assert answer.status == 202, told
    ready = await settled(http, f"/v1/loras/{told['id']}")
    assert ready.get("state") == "ready", ready
    return str(ready["id"])


async def edited(http: aiohttp.ClientSession, **fields: Any) -> dict[str, Any]:
    return await answered(http, data=edit_form(reuse="off", **fields))


def painted(answer: dict[str, Any]) -> np.ndarray[Any, Any]:
    return first_picture(answer).astype(int)


async def test_an_edit_under_a_lora_is_what_the_lora_makes_of_it(
    http: aiohttp.ClientSession, stack: LiveStack, lora: bytes
) -> None:
    name = await uploaded(http, lora)
    plain = await edited(http)
    under, again, half, none = [
        await edited(http, loras=json.dumps([{"id": name, "scale": scale}])) for scale in (1, 1, 0.5, 0)
    ]
    assert plain["giornata"]["loras_from"] == [None]
    assert under["giornata"]["loras_from"] == [0]
    assert (painted(under) == painted(again)).all()
    assert np.abs(painted(none) - painted(plain)).max() <= 1
    effects = [np.abs(painted(one) - painted(plain)).max() for one in (half, under)]
    assert min(effects) > 8, effects
    assert np.abs(painted(half) - painted(under)).max() > 8
    async with giornata.client.connect(stack.nats_url) as client:
        how: dict[str, Any] = {"prompt": "a red hat", "num_inference_steps": 4, "seed": 7, "reuse": "off"}
        result = await (await client.edit(image=file(scene()), mask=file(box()), loras=[{"id": name}], **how))
        assert (pixels(result.pictures[0].data).astype(int) == painted(under)).all()
        assert result.pictures[0].loras_from == 0


async def test_pictures_tell_how_late_a_lora_may_join(
    http: aiohttp.ClientSession, stack: LiveStack, faint: bytes, lora: bytes
) -> None:
    names = [await uploaded(http, file) for file in (faint, lora)]
    told: dict[str, LoraProfile] = {}

    def ended(record: LoraRecord, outcome: LoraProfile | GiornataError) -> None:
        assert isinstance(outcome, LoraProfile), outcome
        told[record.lora_id] = outcome

    login = ProfilerLogin(stack.nats_url, stack.password_file(NatsRole.PROFILER), stack.blobs_url)
    async with connected(login, ProbeSetting(steps=4), scenes()[:1]) as session:
        found = await session.found(names)
        assert await session.profile(found, lambda _: lambda _edits, _tried: None, ended)
    shares = [told[name].joins_within for name in names]
    assert shares[0] == 0.5 > shares[1], {name: told[name].tried for name in names}
    for name, share in zip(names, shares, strict=True):
        async with http.get(f"/v1/loras/{name}") as answer:
            assert (await answer.json())["joins_within"] == share
        bounded = await edited(http, loras=json.dumps([{"id": name}]), lora_wait="bounded")
        assert bounded["giornata"]["loras_from"][0] <= 4 * share
