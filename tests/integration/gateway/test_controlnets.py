"""ControlNets of requests, through both doors in front of a scripted router."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
import pytest_asyncio

import giornata.client
from giornata.wire.adapters import Annotator, ControlCard, ControlKind, ControlUse
from giornata.wire.errors import ControlNetNotFound, IdempotencyKeyReused, InvalidField
from tests.integration.fake_router import CARD, PAINTER
from tests.integration.gateway_fakes import Answer, Stage

OUTLINE = ControlCard(name="outline", digest="o" * 64, kind=ControlKind.FLUX, text_channels=32)
UNION = ControlCard(name="union", digest="u" * 64, kind=ControlKind.FLUX, text_channels=32, modes=3)
ASKED = [
    {"model": "outline", "image": 1, "scale": 0.5},
    {"model": "union", "image": 0, "annotator": "canny", "mode": 2},
]
USES = (
    ControlUse(model="outline", digest="o" * 64, image=1, scale=0.5),
    ControlUse(model="union", digest="u" * 64, image=0, annotator=Annotator.CANNY, mode=2),
)
FILES = (b"one", b"two")


@pytest_asyncio.fixture(loop_scope="module")
async def controlled(stage: Stage) -> Stage:
    """A gateway whose fleet serves a painter with two ControlNets."""
    stage.router.cards, stage.router.controlnets = (CARD, PAINTER), {"painter": (OUTLINE, UNION)}
    await stage.router.announce()
    views = {view["id"]: view for view in (await stage.get("/v1/models")).json["data"]}
    assert views["painter"]["controlnets"] == [{"name": "outline", "modes": 0}, {"name": "union", "modes": 3}]
    assert "control_image_0" in views["painter"]["fields"]["edit"]
    assert "controlnets" not in views["tiny"]["fields"]["edit"]
    return stage


async def kept(stage: Stage) -> tuple[tuple[ControlUse, ...], list[bytes]]:
    """What the latest job has of ControlNets."""
    job = (await stage.record()).job
    return job.controls, [await stage.router.blobs.get(ref) for ref in job.control_images]


async def posted(stage: Stage, *parts: tuple[str, bytes], asked: object = (), **fields: str) -> Answer:
    named = {"model": "painter", "controlnets": json.dumps(asked)} | fields
    form = stage.form(b"picture", b"mask", *parts, **named)
    return await stage.post("/v1/jobs", data=form)


async def test_an_edit_brings_their_images_as_parts(controlled: Stage) -> None:
    parts = [("control_image_1", b"two"), ("control_image_0", b"one")]
    answer = (await posted(controlled, *parts, asked=ASKED)).expect(202).json
    assert await kept(controlled) == (USES, list(FILES))
    assert [one["model"] for one in answer["controlnets"]] == ["outline", "union"]


async def test_a_generation_brings_them_as_text(controlled: Stage) -> None:
    written = {f"control_image_{i}": base64.b64encode(data).decode() for i, data in enumerate(FILES)}
    asked = {"prompt": "a barn", "model": "painter", "controlnets": ASKED, **written}
    assert (await controlled.post("/v1/images/generations", json=asked)).status == 200
    assert await kept(controlled) == (USES, list(FILES))


async def test_the_nats_door_takes_them(controlled: Stage, nats_url: str) -> None:
    async with giornata.client.connect(nats_url) as client:
        named: dict[str, Any] = {"prompt": "a scarf", "model": "painter", "controlnets": ASKED}
        await (await client.edit(image=b"picture", control_image=FILES, **named))
        assert await kept(controlled) == (USES, list(FILES))
        await (await client.generate(control_image=FILES, **named))
        assert await kept(controlled) == (USES, list(FILES))
        await (await client.edit(image=b"picture", control_image=FILES, idempotency_key="k", **named))
        with pytest.raises(IdempotencyKeyReused, match="its control images"):
            await client.edit(image=b"picture", control_image=FILES[::-1], idempotency_key="k", **named)
        with pytest.raises(InvalidField, match="too many control images"):
            await client.edit(image=b"picture", control_image=(b"x",) * 4, **named)
        with pytest.raises(InvalidField, match="needs a control image"):
            await client.edit(image=b"picture", control_image=FILES[:1], **named)
        with pytest.raises(ControlNetNotFound, match="belongs to painter"):
            await client.edit(image=b"picture", control_image=FILES, **named | {"model": "tiny"})


@pytest.mark.parametrize(
    ("parts", "asked", "status", "code", "field"),
    [
        ([], [{"model": "depth", "annotator": "canny"}], 404, "controlnet_not_found", "controlnets"),
        ([], [{"model": "union", "annotator": "canny"}], 400, "invalid_field", "controlnets.mode"),
        ([], [{"model": "outline", "annotator": "depth"}], 400, "invalid_field", "controlnets.0.annotator"),
        ([("control_image_1", b"x")], [{"model": "outline", "image": 1}], 400, "invalid_field", "control_image_0"),
        ([("control_image_0", b"x")], [], 400, "invalid_field", "control_image_0"),
        ([("control_image_0", b"")], [{"model": "outline", "image": 0}], 400, "invalid_field", "control_image_0"),
        ([("control_image_0", b"x")] * 2, [{"model": "outline", "image": 0}], 400, "invalid_field", "control_image_0"),
        ([("control_image", b"x")], [{"model": "outline", "image": 0}], 400, "invalid_field", "control_image"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_told(
    controlled: Stage, parts: list[tuple[str, bytes]], asked: object, status: int, code: str, field: str
) -> None:
    answer = await posted(controlled, *parts, asked=asked)
    told = answer.error
    assert (answer.status, told["code"], told["param"]) == (status, code, field), told["message"]
