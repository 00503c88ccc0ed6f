"""Masks from words at the doors: edits that name what to repaint, and ``/v1/masks``, with prepost's own way behind."""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import pytest_asyncio

import giornata.client
from giornata.blobs import BlobStore
from giornata.bus import bus
from giornata.wire import codec, subjects
from giornata.wire.errors import (
    DeadlineExceeded,
    GiornataError,
    InvalidField,
    MasksNotServed,
    NothingFound,
    RateLimited,
    TooManyRequests,
    Unauthorized,
)
from giornata.wire.jobs import BlobRef
from giornata.wire.messages import (
    IDEMPOTENCY_HEADER,
    MaskMessage,
    MaskMessageReply,
    MaskParameters,
)
from giornata_lab.bench.systems.edit_forms import file, pixels
from tests.fakes.colours import CARD, ColourMasks
from tests.fakes.key_files import write_keys
from tests.integration.fake_router import CARD as MODEL
from tests.integration.gateway.test_templates import edit, register
from tests.integration.gateway_fakes import Answer, Opening, Stage, multipart
from tests.patience import HUNG_S
from tests.present import present

SCENE = np.full((48, 80, 3), 200, np.uint8)
SCENE[8:24, 4:30] = (255, 0, 0)
SCENE[30:44, 50:76] = (235, 0, 0)
RED = SCENE[..., 1] == 0


FILE = file(SCENE)


@dataclass
class Scene:
    """A gateway before a prepost that finds colours."""

    stage: Stage
    prepost: ColourMasks

    async def edit(self, path: str = "/v1/images/edits", /, **fields: str) -> Answer:
        form = self.stage.form(FILE, None, **({"mask_prompt": "the red hats"} | fields))
        return await self.stage.post(path, data=form)

    async def masks(
        self, image: bytes = FILE, headers: dict[str, str] | None = None, /, **fields: str
    ) -> Answer:
        form = multipart(("image", image), **{"prompt": "the red hats"} | fields)
        return await self.stage.post("/v1/masks", data=form, headers=headers)

    async def mask_of_job(self) -> Any:
        job = (await self.stage.record()).job
        return pixels(await self.stage.router.blobs.get(present(job.mask)))


@asynccontextmanager
async def seeing(stage: Stage) -> AsyncIterator[Scene]:
    """The gateway before a prepost that finds colours."""
    prepost = ColourMasks(stage.router.bus, stage.router.blobs, MODEL.name)
    stage.router.masks = CARD
    async with prepost.running():
        await stage.router.announce()
        yield Scene(stage, prepost)


@pytest_asyncio.fixture(loop_scope="module")
async def scene(stage: Stage) -> AsyncIterator[Scene]:
    async with seeing(stage) as scene:
        yield scene


async def test_an_edit_names_what_it_repaints(scene: Scene) -> None:
    (await scene.edit()).expect(200)
    job = (await scene.stage.record()).job
    assert (job.parameters.mask_prompt, job.parameters.mask_threshold) == ("the red hats", None)
    assert present(job.mask).key.startswith(job.upload_folder), "it is forgotten with the job's own pictures"
    assert np.array_equal(await scene.mask_of_job(), RED)


async def test_threshold_and_number_choose_regions(scene: Scene) -> None:
    for fields in ({"mask_threshold": "0.95"}, {"max_regions": "1"}):
        assert (await scene.edit(**fields)).status == 200
        assert (await scene.mask_of_job()).sum() == 26 * 16


async def test_a_repeated_request_is_one_job_and_one_mask(scene: Scene) -> None:
    headers = {"Idempotency-Key": secrets.token_hex(8)}
    for _ in range(2):
        form = scene.stage.form(FILE, None, mask_prompt="red")
        assert (await scene.stage.post("/v1/jobs", data=form, headers=headers)).status == 202
    assert len(scene.prepost.asked) == 1
    form = scene.stage.form(FILE, None, mask_prompt="blue")
    answer = await scene.stage.post("/v1/jobs", data=form, headers=headers)
    assert answer.code == (422, "idempotency_key_reused")


async def test_a_template_is_edited_by_words(scene: Scene) -> None:
    name = (await register(scene.stage, FILE)).json["id"]
    (await edit(scene.stage, template_id=name, mask_prompt="red")).expect(200)
    assert np.array_equal(await scene.mask_of_job(), RED)


async def test_where_nothing_is_found_no_job_is_made_and_nothing_is_kept(scene: Scene) -> None:
    answer = await scene.edit(mask_prompt="the green hat")
    assert answer.code == (422, "nothing_found")
    assert "the green hat" in answer.error["received"]
    assert "0.216" in answer.error["received"]
    assert scene.stage.router.submitted == set()
    (asked,) = scene.prepost.asked
    await forgotten(scene.stage.router.blobs, asked.image)


async def forgotten(blobs: BlobStore, ref: BlobRef) -> None:
    async with asyncio.timeout(HUNG_S):
        while await blobs.has(ref):  # noqa: ASYNC110 - forgetting is not told
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"mask_prompt": " "}, "mask_prompt", "blank"),
        ({"mask_prompt": "x" * 201}, "mask_prompt", "200"),
        ({"mask_threshold": "0"}, "mask_threshold", "greater than 0"),
        ({"max_regions": "17"}, "max_regions", "16"),
        ({"mask_mode": "alpha"}, "mask_mode", "alpha"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(
    scene: Scene, fields: dict[str, str], param: str, says: str
) -> None:
    answer = await scene.edit(**fields)
    assert answer.refusal == (400, "invalid_field", param)
    assert says in answer.error["message"]
    assert scene.prepost.asked == []


async def test_a_mask_and_words_for_one_are_refused(scene: Scene) -> None:
    answer = await scene.stage.edit(mask_prompt="red")
    assert (answer.status, answer.error["param"], answer.error["received"]) == (400, "mask_prompt", "both")


@pytest.mark.parametrize("field", ["mask_threshold", "max_regions"])
async def test_what_belongs_to_words_is_refused_without_them(scene: Scene, field: str) -> None:
    answer = await scene.stage.edit(**{field: "1"})
    assert answer.fault == (400, field)
    assert "needs mask_prompt" in answer.error["message"]


async def test_where_nothing_makes_masks_words_are_refused_at_once(stage: Stage) -> None:
    scene = Scene(stage, ColourMasks(stage.router.bus, stage.router.blobs, MODEL.name))
    answer = await scene.edit()
    assert answer.refusal == (400, "masks_not_served", "mask_prompt")
    assert (await scene.masks()).code == (400, "masks_not_served")
    (model,) = (await stage.get("/v1/models")).json["data"]
    assert model["masks"] is None
    assert "mask_prompt" not in model["fields"]["edit"]


async def test_models_tell_what_makes_masks(scene: Scene) -> None:
    (model,) = (await scene.stage.get("/v1/models")).json["data"]
    assert model["masks"] == CARD.name
    assert {"mask_prompt", "mask_threshold", "max_regions"} <= set(model["fields"]["edit"])


async def test_masks_are_shown_with_their_regions_and_nothing_of_them_is_kept(scene: Scene) -> None:
    answer = (await scene.masks()).expect(200).json
    assert (answer["width"], answer["height"], answer["model"], answer["threshold"]) == (
        80,
        48,
        CARD.name,
        0.5,
    )
    assert [one["box"] for one in answer["regions"]] == [[4, 8, 26, 16], [50, 30, 26, 14]]
    assert [one["area"] for one in answer["regions"]] == [26 * 16, 26 * 14]
    assert answer["regions"][0]["score"] > answer["regions"][1]["score"] > 0.9
    masks = [pixels(base64.b64decode(one["b64_png"])) for one in (answer, *answer["regions"])]
    assert np.array_equal(masks[0], RED)
    assert np.array_equal(masks[1] | masks[2], RED)
    (asked,) = scene.prepost.asked
    assert asked.each
    for name in ("image", "mask", "region_0"):
        await forgotten(scene.stage.router.blobs, asked.image.model_copy(update={"key": asked.folder + name}))


@pytest.mark.parametrize("fields", [{"response_format": "image"}, {}])
async def test_a_mask_alone_is_a_png(scene: Scene, fields: dict[str, str]) -> None:
    headers = None if fields else {"Accept": "image/png"}
    body = (await scene.masks(FILE, headers, **fields)).expect(200).body
    assert np.array_equal(pixels(body), RED)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": " "}, "invalid_field", "prompt"),
        ({"prompt": "the green hat"}, "nothing_found", None),
        ({"n": "2"}, "unknown_field", "n"),
        ({"model": "other"}, "model_not_found", "model"),
        ({"response_format": "url"}, "invalid_field", "response_format"),
    ],
)
async def test_bad_requests_for_masks_are_refused_by_name(
    scene: Scene, fields: dict[str, str], code: str, param: str | None
) -> None:
    answer = await scene.masks(**fields)
    assert 400 <= answer.status < 500
    assert (answer.error["code"], answer.error["param"]) == (code, param)


async def test_other_files_and_keys_are_refused_with_a_request_for_a_mask(scene: Scene) -> None:
    assert (await scene.stage.post("/v1/masks", data=scene.stage.form(FILE))).fault == (400, "mask")
    assert (await scene.masks(FILE, {"Idempotency-Key": "k"})).code == (400, "not_supported")


async def test_a_prepost_that_is_replaced_is_asked_again(stage: Stage) -> None:
    prepost = ColourMasks(stage.router.bus, stage.router.blobs, MODEL.name)
    stage.router.masks = CARD
    await stage.router.announce()
    scene = Scene(stage, prepost)
    asking = asyncio.create_task(scene.edit())
    await asyncio.sleep(0)
    async with prepost.running():
        assert (await asking).status == 200


async def test_each_region_may_be_edited_by_itself(scene: Scene) -> None:
    (await scene.edit(auto_edit="true", n="1", response_format="url")).expect(200)
    job = (await scene.stage.record()).job
    assert (job.row_count, job.parameters.n) == (2, 1)
    assert (job.parameters.reuse, job.parameters.padding_mask_crop, job.parameters.max_regions) == (
        "off",
        32,
        4,
    )
    masks = [pixels(await scene.stage.router.blobs.get(ref)) for ref in job.regions]
    assert np.array_equal(masks[0] | masks[1], RED)
    assert not (masks[0] & masks[1]).any()
    assert np.array_equal(await scene.mask_of_job(), RED)
    assert all(ref.key.startswith(job.upload_folder) for ref in job.pictures)
    await scene.edit(auto_edit="true", padding_mask_crop="0", max_regions="1")
    job = (await scene.stage.record()).job
    assert (job.row_count, job.parameters.padding_mask_crop) == (1, 0)
    await scene.edit()
    assert (await scene.stage.record()).job.regions == ()


async def test_a_picture_of_regions_is_told_as_one(scene: Scene) -> None:
    told = (await scene.edit("/v1/jobs", auto_edit="true")).expect(202).json
    events = ((await scene.stage.get(f"/v1/jobs/{told['id']}/events")).text).split("event: ")
    assert len([event for event in events if event.startswith("image_edit.completed")]) == 1
    view = (await scene.stage.get(f"/v1/jobs/{told['id']}")).json
    assert [picture["index"] for picture in view["pictures"]] == [0]
    for index, status in ((0, 200), (1, 400)):
        assert (await scene.stage.get(f"/v1/jobs/{told['id']}/image?index={index}")).status == status


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"n": "2"}, "auto_edit", "takes no n"),
        ({"partial_images": "1", "stream": "true"}, "auto_edit", "takes no partial_images"),
        ({"mask_mode": "black"}, "mask_mode", "auto_edit"),
        ({"reuse": "strict"}, "reuse", "auto_edit"),
    ],
)
async def test_what_regions_cannot_be_edited_with_is_refused(
    scene: Scene, fields: dict[str, str], param: str, says: str
) -> None:
    answer = await scene.edit(auto_edit="true", **fields)
    assert answer.refusal == (400, "invalid_field", param)
    assert says in answer.error["message"]


async def test_regions_need_words_and_a_picture_of_their_own(scene: Scene) -> None:
    assert (await scene.stage.edit(auto_edit="true")).fault == (400, "auto_edit")
    name = (await register(scene.stage, FILE)).json["id"]
    answer = await edit(scene.stage, template_id=name, mask_prompt="red", auto_edit="true")
    assert answer.fault == (400, "auto_edit")


async def test_regions_count_as_pictures(opening: Opening) -> None:
    async with opening(tenant_per_minute=5) as stage, seeing(stage) as scene:
        assert [(await scene.edit(auto_edit="true")).status for _ in range(2)] == [200, 429]
        assert (await scene.edit(auto_edit="true", max_regions="1")).status == 200


HATS = "the red hats"


async def answered_masks(scene: Scene) -> float:
    """How many masks were asked for over NATS."""
    lines = ((await scene.stage.get("/metrics")).text).splitlines()
    told = [line for line in lines if line.startswith("giornata_requests_total") and subjects.MASK in line]
    return sum(float(line.rpartition(" ")[2]) for line in told)


async def test_both_doors_show_the_same_and_keep_nothing(scene: Scene, nats_url: str) -> None:
    before = await answered_masks(scene)
    told = (await scene.masks(max_regions="2", mask_threshold="0.6")).json
    async with giornata.client.connect(nats_url) as client:
        made = await client.mask(image=FILE, prompt=HATS, max_regions=2, mask_threshold=0.6)
    assert (made.width, made.height, made.model, made.threshold) == (80, 48, CARD.name, 0.6)
    assert base64.b64encode(made.data).decode() == told["b64_png"]
    assert [
        {
            "score": one.score,
            "box": list(one.box),
            "area": one.area,
            "b64_png": base64.b64encode(one.data).decode(),
        }
        for one in made.regions
    ] == told["regions"]
    over_http, over_nats = scene.prepost.asked
    own = {"image", "folder", "remaining_ms", "ttl_s"}
    assert over_nats.model_dump(exclude=own) == over_http.model_dump(exclude=own)
    for name in ("image", "mask", "region_0", "region_1"):
        kept = over_nats.image.model_copy(update={"key": over_nats.folder + name})
        await forgotten(scene.stage.router.blobs, kept)
    assert await answered_masks(scene) == before + 1


async def answered(
    nats_url: str, headers: dict[str, str] | None = None, /, **changes: Any
) -> MaskMessageReply:
    """The answer to a message with `changes`, which are not validated."""
    asked = codec.unpack(codec.encode(MaskMessage(parameters=MaskParameters(prompt=HATS), image=FILE)))
    told = {name: dict(value) if isinstance(value, BlobRef) else value for name, value in changes.items()}
    data = msgpack.packb(asked | told)
    async with bus.connect(nats_url, "bare") as connected:
        reply = await connected.client.request(subjects.MASK, data, timeout=HUNG_S, headers=headers)
    return bus.answer_in(reply, MaskMessageReply)


async def test_bad_messages_for_masks_are_refused_by_name(scene: Scene, nats_url: str) -> None:
    for changes, code, field in (
        ({"image": b""}, "invalid_field", "image"),
        ({"image": b"GIF89a"}, "unsupported_image_format", "image"),
        ({"image": b"x" * ((6 << 20) + 1)}, "payload_too_large", "image"),
        ({"image": BlobRef(key="bob/x", size_bytes=3, sha256="0" * 64)}, "invalid_field", "image"),
        ({"image": BlobRef(key="default/no", size_bytes=3, sha256="0" * 64)}, "invalid_field", "image"),
        ({"image": BlobRef(key="default/no", size_bytes=1 << 40, sha256="0" * 64)}, "payload_too_large", "image"),
        ({"remaining_ms": 0}, "invalid_field", "remaining_ms"),
        ({"parameters": {"prompt": " "}}, "invalid_field", "prompt"),
        ({"parameters": {"prompt": HATS, "mask_threshold": 2.0}}, "invalid_field", "mask_threshold"),
        ({"parameters": {"prompt": HATS, "model": "other"}}, "model_not_found", "model"),
        ({"parameters": {"prompt": HATS, "response_format": "image"}}, "unknown_field", "response_format"),
        ({"parameters": [HATS]}, "invalid_field", "parameters"),
    ):  # fmt: skip
        with pytest.raises(GiornataError) as refused:
            await answered(nats_url, **changes)
        assert (refused.value.code, refused.value.field) == (code, field), changes
    with pytest.raises(GiornataError) as refused:
        await answered(nats_url, {IDEMPOTENCY_HEADER: "k"})
    assert (refused.value.code, refused.value.field) == ("not_supported", IDEMPOTENCY_HEADER)
    assert [one.image.size_bytes for one in scene.prepost.asked] == [len(b"GIF89a")], (
        "all others were not asked"
    )


async def test_what_is_not_there_is_told_by_the_same_errors(stage: Stage, nats_url: str) -> None:
    async with giornata.client.connect(nats_url) as client:
        with pytest.raises(MasksNotServed):
            await client.mask(image=FILE, prompt="red")
        async with seeing(stage) as scene:
            with pytest.raises(NothingFound, match="the green hat"):
                await client.mask(image=FILE, prompt="the green hat")
            with pytest.raises(InvalidField, match="prompt"):
                await client.mask(image=FILE, prompt="x" * 201)
            scene.prepost.hold = asyncio.Event()
            with pytest.raises(DeadlineExceeded):
                await client.mask(image=FILE, prompt="red", timeout_s=1)
            scene.prepost.hold.set()
            assert (await client.mask(image=FILE, prompt="red")).regions


async def test_keys_and_limits_are_those_of_the_other_door(
    nats_url: str, opening: Opening, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path, {"sk-alice-123": "alice", "sk-robert-12": "bob"})
    options: dict[str, Any] = {"api_keys_file": keys, "tenant_per_minute": 1, "max_held_bytes": 2 << 20}
    options["max_request_bytes"] = 2 << 20
    async with opening(**options) as stage, seeing(stage) as scene:
        with pytest.raises(Unauthorized):
            await answered(nats_url)
        with pytest.raises(TooManyRequests, match="being received"):
            await answered(nats_url, api_key="sk-alice-123", image=b"x" * (3 << 19))
        await answered(nats_url, api_key="sk-alice-123")
        with pytest.raises(RateLimited):
            await answered(nats_url, api_key="sk-alice-123")
        alice, bob = ({"Authorization": f"Bearer {key}"} for key in ("sk-alice-123", "sk-robert-12"))
        assert [(await scene.masks(FILE, who)).status for who in (alice, bob, bob)] == [429, 200, 429]
    assert [one.folder.partition("/")[0] for one in scene.prepost.asked] == ["alice", "bob"]
