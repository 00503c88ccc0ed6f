"""Pictures beside an edit's own, references and control images, through both doors in front of a scripted router."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
import pytest_asyncio

import giornata.client
from giornata.families import Family
from giornata.wire.adapters import Annotator, ControlCard, ControlKind, ControlUse
from giornata.wire.errors import ControlNetNotFound, IdempotencyKeyReused, InvalidField
from giornata.wire.models import Task
from tests.integration.fake_router import CARD, PAINTER
from tests.integration.gateway_fakes import Answer, Stage

KLEIN = PAINTER.model_copy(update={"name": "klein", "family": Family.FLUX2_KLEIN, "max_references": 2})
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
LOOKING: dict[str, Any] = {"model": "klein"}
CONTROLLED: dict[str, Any] = {"model": "painter", "controlnets": ASKED}


@pytest_asyncio.fixture(loop_scope="module")
async def looking(stage: Stage) -> Stage:
    """A gateway whose fleet has a Fill model, one that looks at two references, and one with two ControlNets."""
    stage.router.cards, stage.router.controlnets = (CARD, KLEIN, PAINTER), {"painter": (OUTLINE, UNION)}
    await stage.router.announce()
    return stage


async def kept(stage: Stage) -> list[bytes]:
    """The references of the latest job, or its control images."""
    job = (await stage.record()).job
    assert job.controls == (USES if job.control_images else ())
    return [await stage.router.blobs.get(ref) for ref in (*job.references, *job.control_images)]


async def posted(
    stage: Stage, *parts: tuple[str, bytes], path: str = "/v1/images/edits", **fields: Any
) -> Answer:
    told = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
    return await stage.post(path, data=stage.form(b"picture", b"mask", *parts, **told))


@pytest.mark.parametrize(
    ("names", "fields"),
    [
        (("reference", "reference"), LOOKING),
        (("reference_0", "reference_1"), LOOKING),
        (("image[]", "image[]"), LOOKING),
        (("control_image_0", "control_image_1"), CONTROLLED),
    ],
)
async def test_an_edit_brings_them_as_parts(
    looking: Stage, names: tuple[str, str], fields: dict[str, Any]
) -> None:
    parts = zip(names, FILES, strict=True)
    given = reversed([*parts]) if fields is CONTROLLED else parts
    answer = (await posted(looking, *given, path="/v1/jobs", **fields)).expect(202).json
    assert await kept(looking) == list(FILES)
    assert (await looking.record()).job.task is Task.EDIT
    assert [one["model"] for one in answer["controlnets"]] == [
        one["model"] for one in fields.get("controlnets", ())
    ]


@pytest.mark.parametrize("prefix", ["", "data:image/png;base64,"])
@pytest.mark.parametrize("fields", [LOOKING, CONTROLLED])
async def test_a_generation_brings_them_as_text(looking: Stage, prefix: str, fields: dict[str, Any]) -> None:
    written = [prefix + base64.b64encode(data).decode() for data in FILES]
    named = {f"control_image_{index}": data for index, data in enumerate(written)}
    asked = {"prompt": "a barn"} | fields | (named if fields is CONTROLLED else {"reference": written})
    assert (await looking.post("/v1/images/generations", json=asked)).status == 200
    assert await kept(looking) == list(FILES)
    assert (await looking.record()).job.task is Task.GENERATE


@pytest.mark.parametrize(
    ("fields", "name", "told"),
    [(LOOKING, "reference", "its references"), (CONTROLLED, "control_image", "its control images")],
)
async def test_the_nats_door_takes_them(
    looking: Stage, nats_url: str, fields: dict[str, Any], name: str, told: str
) -> None:
    named, turned = ({"prompt": "a scarf", name: files} | fields for files in (FILES, FILES[::-1]))
    async with giornata.client.connect(nats_url) as client:
        await (await client.edit(image=b"picture", **named))
        assert await kept(looking) == list(FILES)
        await (await client.generate(**named))
        assert await kept(looking) == list(FILES)
        await (await client.edit(image=b"picture", idempotency_key=name, **named))
        with pytest.raises(IdempotencyKeyReused, match=told):
            await client.edit(image=b"picture", idempotency_key=name, **turned)


@pytest.mark.parametrize(
    ("fields", "refused", "told"),
    [
        ({"model": "tiny", "reference": FILES}, InvalidField, "takes no references"),
        (CONTROLLED | {"control_image": (b"x",) * 4}, InvalidField, "too many control images"),
        (CONTROLLED | {"control_image": FILES[:1]}, InvalidField, "needs a control image"),
        (CONTROLLED | {"control_image": FILES, "model": "tiny"}, ControlNetNotFound, "belongs to painter"),
    ],
)
async def test_the_nats_door_refuses_what_does_not_fit(
    looking: Stage, nats_url: str, fields: dict[str, Any], refused: type[Exception], told: str
) -> None:
    async with giornata.client.connect(nats_url) as client:
        with pytest.raises(refused, match=told):
            await client.edit(image=b"picture", prompt="a scarf", **fields)


async def test_models_that_take_none_name_those_that_do(looking: Stage) -> None:
    answer = await posted(looking, ("reference", b"one"), model="tiny")
    told = answer.error
    assert (answer.status, told["code"], told["param"]) == (400, "invalid_field", "reference")
    assert told["accepted"] == "leave reference out; models that take so many: klein"
    views = {view["id"]: view for view in (await looking.get("/v1/models")).json["data"]}
    assert [views[name]["max_references"] for name in ("tiny", "klein")] == [0, 2]
    assert "reference" not in views["tiny"]["fields"]["edit"]
    assert all("reference" in fields for fields in views["klein"]["fields"].values())
    assert views["painter"]["controlnets"] == [{"name": "outline", "modes": 0}, {"name": "union", "modes": 3}]
    assert "control_image_0" in views["painter"]["fields"]["edit"]
    assert "controlnets" not in views["tiny"]["fields"]["edit"]


@pytest.mark.parametrize(
    ("parts", "code", "accepted"),
    [
        ([("reference", b"x")] * 3, "invalid_field", "at most 2"),
        ([("reference", b"x")] * 16, "invalid_field", "at most 15"),
        ([("reference", b"")], "invalid_field", "one PNG, JPEG or WebP file"),
        (
            [("reference_15", b"x")],
            "invalid_field",
            "files: image, mask, reference, control_image_0, control_image_1, control_image_2",
        ),
    ],
)
async def test_wrong_references_are_refused(
    looking: Stage, parts: list[tuple[str, bytes]], code: str, accepted: str
) -> None:
    answer = await posted(looking, *parts, model="klein")
    assert (answer.status, answer.error["code"], answer.error["accepted"]) == (400, code, accepted)
    assert not looking.router.jobs


@pytest.mark.parametrize("written", ["%", [7], {"a": "b"}, [""], ["eA=="] * 9])
async def test_text_that_is_no_picture_is_refused(looking: Stage, written: object) -> None:
    asked = {"prompt": "a barn", "model": "klein", "reference": written}
    answer = await looking.post("/v1/images/generations", json=asked)
    told = answer.error
    assert (answer.status, told["code"], told["param"]) == (400, "invalid_field", "reference")


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
async def test_wrong_controlnets_are_refused(
    looking: Stage, parts: list[tuple[str, bytes]], asked: object, status: int, code: str, field: str
) -> None:
    answer = await posted(looking, *parts, path="/v1/jobs", model="painter", controlnets=asked)
    told = answer.error
    assert (answer.status, told["code"], told["param"]) == (status, code, field), told["message"]
