"""Pictures that a model looks at, through both doors in front of a scripted router."""

from __future__ import annotations

import base64
from typing import Any

import pytest
import pytest_asyncio

import giornata.client
from giornata.families import Family
from giornata.wire.errors import IdempotencyKeyReused, InvalidField
from giornata.wire.models import Task
from tests.integration.fake_router import CARD, PAINTER
from tests.integration.gateway_fakes import Answer, Stage

KLEIN = PAINTER.model_copy(update={"name": "klein", "family": Family.FLUX2_KLEIN, "max_references": 2})
FILES = (b"one", b"two")


@pytest_asyncio.fixture(loop_scope="module")
async def looking(stage: Stage) -> Stage:
    """A gateway whose fleet has a Fill model, and one that looks at two references."""
    await stage.serve(CARD, KLEIN)
    return stage


async def kept(stage: Stage) -> list[bytes]:
    """The references of the latest job."""
    return [await stage.router.blobs.get(ref) for ref in (await stage.record()).job.references]


async def posted(
    stage: Stage, *parts: tuple[str, bytes], path: str = "/v1/images/edits", **fields: str
) -> Answer:
    form = stage.form(b"picture", b"mask", *parts, **{"model": "klein"} | fields)
    return await stage.post(path, data=form)


@pytest.mark.parametrize(
    "names", [("reference", "reference"), ("reference_0", "reference_1"), ("image[]",) * 2]
)
async def test_an_edit_brings_them_as_parts(looking: Stage, names: tuple[str, str]) -> None:
    (await posted(looking, *zip(names, FILES, strict=True), path="/v1/jobs")).expect(202)
    assert await kept(looking) == list(FILES)
    assert (await looking.record()).job.task is Task.EDIT


@pytest.mark.parametrize("prefix", ["", "data:image/png;base64,"])
async def test_a_generation_brings_them_as_text(looking: Stage, prefix: str) -> None:
    written = [prefix + base64.b64encode(data).decode() for data in FILES]
    asked = {"prompt": "a barn", "model": "klein", "reference": written}
    assert (await looking.post("/v1/images/generations", json=asked)).status == 200
    assert await kept(looking) == list(FILES)
    assert (await looking.record()).job.task is Task.GENERATE


async def test_the_nats_door_takes_them(looking: Stage, nats_url: str) -> None:
    async with giornata.client.connect(nats_url) as client:
        await (await client.edit(image=b"picture", prompt="a scarf", model="klein", reference=FILES))
        assert await kept(looking) == list(FILES)
        await (await client.generate(prompt="a barn", model="klein", reference=FILES[:1]))
        assert await kept(looking) == [b"one"]
        with pytest.raises(InvalidField, match="takes no references"):
            await client.edit(image=b"picture", prompt="a scarf", model="tiny", reference=FILES)
        key = "with a reference"
        named: dict[str, Any] = {"prompt": "a scarf", "model": "klein", "idempotency_key": key}
        await (await client.edit(image=b"picture", reference=FILES, **named))
        with pytest.raises(IdempotencyKeyReused, match="its references"):
            await client.edit(image=b"picture", reference=FILES[::-1], **named)


async def test_models_that_take_none_name_those_that_do(looking: Stage) -> None:
    answer = await posted(looking, ("reference", b"one"), model="tiny")
    told = answer.error
    assert (answer.status, told["code"], told["param"]) == (400, "invalid_field", "reference")
    assert told["accepted"] == "leave reference out; models that take so many: klein"
    views = {view["id"]: view for view in (await looking.get("/v1/models")).json["data"]}
    assert [views[name]["max_references"] for name in ("tiny", "klein")] == [0, 2]
    assert "reference" not in views["tiny"]["fields"]["edit"]
    assert all("reference" in fields for fields in views["klein"]["fields"].values())


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
    answer = await posted(looking, *parts)
    assert (answer.status, answer.error["code"], answer.error["accepted"]) == (400, code, accepted)
    assert not looking.router.jobs


@pytest.mark.parametrize("written", ["%", [7], {"a": "b"}, [""], ["eA=="] * 9])
async def test_text_that_is_no_picture_is_refused(looking: Stage, written: object) -> None:
    asked = {"prompt": "a barn", "model": "klein", "reference": written}
    answer = await looking.post("/v1/images/generations", json=asked)
    told = answer.error
    assert (answer.status, told["code"], told["param"]) == (400, "invalid_field", "reference")
