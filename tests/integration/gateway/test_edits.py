"""`POST /v1/images/edits` in front of a scripted router."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio
from openai.types import ImagesResponse

import giornata.client
from giornata.families import Family
from giornata.wire.adapters import Annotator, ControlCard, ControlKind, ControlUse
from giornata.wire.errors import (
    ControlNetNotFound,
    GiornataError,
    IdempotencyKeyReused,
    InvalidField,
    MaskEmpty,
    QueueFull,
    RowPoisoned,
    TaskNotSupported,
)
from giornata.wire.jobs import JobState
from giornata.wire.messages import StepEvent
from giornata.wire.models import Task
from giornata.wire.requests import Reuse
from tests.integration.fake_router import CARD, COMPUTE, PAINTER, STAGES, picture_of
from tests.integration.gateway.test_idempotency import stored
from tests.integration.gateway_fakes import Answer, Opening, Stage, leave, multipart
from tests.patience import HUNG_S
from tests.present import present


async def test_an_edit_is_answered_in_openais_form(stage: Stage) -> None:
    answer = (await stage.edit(n="2", seed="7", quality="auto", background="auto")).expect(200).json
    assert [base64.b64decode(item["b64_json"]) for item in answer["data"]] == [picture_of(0), picture_of(1)]
    ImagesResponse.model_validate(answer, strict=True)
    assert answer["usage"] == {
        "input_tokens": 60,
        "input_tokens_details": {
            "text_tokens": 48,
            "image_tokens": 12,
            "prompt_tokens": {"given": 60, "read": 47},
            "negative_prompt_tokens": None,
        },
        "output_tokens": 10,
        "total_tokens": 70,
    }
    extension = answer["giornata"]
    assert extension["seeds"] == [7, 8]
    assert extension["stage_ms"] == STAGES.model_dump()
    assert extension["compute_ms"] == COMPUTE.model_dump()
    assert extension["steps"] == 3
    job = stage.router.jobs[extension["job_id"]]
    assert await stage.router.blobs.get(present(job.image)) == b"picture"
    assert await stage.router.blobs.get(present(job.mask)) == b"mask"
    assert job.parameters.guidance_scale == 30.0


async def test_the_official_client_raises_what_the_job_failed_with(stage: Stage) -> None:
    stage.router.failure = MaskEmpty()
    async with openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as plain:
            await client.images.edit(image=b"picture", prompt="a scarf")
        assert plain.value.code == "mask_empty"
        stream = await client.images.edit(image=b"picture", prompt="a scarf", stream=True)
        with pytest.raises(openai.APIError) as streamed:
            [event async for event in stream]
    assert streamed.value.code == "mask_empty"
    assert streamed.value.message == MaskEmpty().message


async def test_links_and_raw_pictures(stage: Stage) -> None:
    answer = (await stage.edit(response_format="url", n="2")).json
    assert (await stage.get(answer["data"][1]["url"])).body == picture_of(1)
    data = stage.form(output_format="webp")
    answer = await stage.post("/v1/images/edits", data=data, headers={"Accept": "image/webp"})
    assert answer.content_type == "image/webp"
    assert answer.body == picture_of(0)


async def test_a_picture_that_fails_does_not_take_the_others_with_it(stage: Stage) -> None:
    stage.router.row_errors = {0: RowPoisoned()}
    answer = (await stage.edit(n="2", seed="3")).expect(200).json
    assert [base64.b64decode(item["b64_json"]) for item in answer["data"]] == [picture_of(1)]
    assert answer["giornata"]["seeds"] == [4]
    assert [(e["index"], e["error"]["code"]) for e in answer["giornata"]["errors"]] == [(0, "row_poisoned")]


async def test_bad_bodies_are_refused(stage: Stage) -> None:
    async def code_of(**request: Any) -> tuple[int, str, str | None]:
        return (await stage.post("/v1/images/edits", **request)).refusal

    twice = stage.form()
    twice.add_field("prompt", "again")
    images = stage.form(b"picture", b"mask", ("image[]", b"x"))
    wrong_file = stage.form(b"picture", b"mask", ("photo", b"x"))
    no_image = stage.form(None, None)
    torn = {
        "data": b"--b\r\nContent-Disposition: form-data; name=x",
        "headers": {"Content-Type": "multipart/form-data; boundary=b"},
    }
    assert await code_of(data=twice) == (400, "invalid_field", "prompt")
    assert await code_of(data=images) == (400, "invalid_field", "reference")
    assert await code_of(data=wrong_file) == (400, "invalid_field", "photo")
    assert await code_of(data=no_image) == (400, "invalid_field", "image")
    assert await code_of(data=stage.form(b"")) == (400, "invalid_field", "image")
    assert await code_of(json={"prompt": "x"}) == (400, "invalid_field", "image")
    assert await code_of(**torn) == (400, "bad_request", None)
    assert await code_of(data=b"", headers={"Content-Type": "multipart/form-data"}) == (
        400,
        "bad_request",
        None,
    )


async def test_limits_of_the_body(opening: Opening) -> None:
    options = {
        "max_file_bytes": 2_000_000,
        "max_request_bytes": 3_000_000,
        "max_parts": 5,
        "max_field_bytes": 300,
    }
    async with opening(**options) as stage:

        async def code_of(form: aiohttp.FormData) -> tuple[int, str]:
            answer = await stage.post("/v1/images/edits", data=form)
            return answer.status, answer.error["code"]

        refused = (413, "payload_too_large")
        assert await code_of(stage.form(b"x" * 2_000_001)) == refused
        assert await code_of(stage.form(b"x" * 1_900_000, b"x" * 1_900_000)) == refused
        assert await code_of(stage.form(prompt="x" * 301)) == refused
        assert await code_of(stage.form(user="a", seed="1", n="1")) == refused
        assert (await stage.post("/v1/images/edits", data=stage.form(b"x" * 1_900_000))).status == 200


async def test_a_client_that_leaves_cancels_its_job(stage: Stage) -> None:
    stage.router.hold = asyncio.Event()
    for fields in ({}, {"stream": "true"}):
        stage.router.held.clear()
        stage.router.ended.clear()
        request = asyncio.create_task(stage.edit(**fields))
        await stage.router.held.wait()
        await leave(request)
        await asyncio.wait_for(stage.router.ended.wait(), HUNG_S)
        assert (await stage.record()).state is JobState.CANCELLED


async def test_too_many_at_once(opening: Opening) -> None:
    async with opening(max_concurrent_rows=2) as stage:
        first = await stage.begin(stage.edit(n="2"))
        answer = (await stage.post("/v1/images/edits", data=stage.form())).expect(429)
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.error["code"] == "too_many_requests"
        stage.router.go_on()
        assert (await first).status == 200
        assert (await stage.edit(n="3")).status == 200  # more than the limit, but the gateway is idle


async def test_a_deadline(opening: Opening) -> None:
    async with opening(budget_s=1) as stage:
        stage.router.hold = asyncio.Event()
        began_s = asyncio.get_running_loop().time()
        answer = await stage.edit()
        assert answer.code == (504, "deadline_exceeded")
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(1, abs=0.1)
        assert answer.error["job_id"] in stage.router.jobs
        await asyncio.wait_for(stage.router.ended.wait(), HUNG_S)


async def test_what_the_router_refuses_is_passed_on(stage: Stage) -> None:
    stage.router.refusals = [QueueFull(retry_after_s=7)]
    answer = await stage.post("/v1/images/edits", data=stage.form())
    assert (answer.status, answer.headers["Retry-After"]) == (429, "7")
    assert answer.error["code"] == "queue_full"
    stage.stop.set()
    await stage.serving
    assert stored(stage) == []


async def test_drain_ends_in_time(opening: Opening) -> None:
    async with opening(drain_s=0.2) as stage:
        request = await stage.begin(stage.edit())
        stage.stop.set()
        assert (await request).code == (503, "service_unavailable")
        async with asyncio.timeout(HUNG_S):
            await stage.serving
            await stage.router.ended.wait()
        assert (await stage.record()).state is JobState.CANCELLED


# Pictures from text through both doors in front of a scripted router.


FLUX = PAINTER.model_copy(
    update={"name": "flux", "takes_true_cfg": True}
    | {"default_strength": 0.6, "default_guidance_scale": 7.0, "generation_steps": 5}
)


@pytest_asyncio.fixture(loop_scope="module")
async def painter(stage: Stage) -> Stage:
    """A gateway whose fleet has a Fill model, and one that generates."""
    await stage.serve(CARD, FLUX)
    return stage


async def generated(stage: Stage, path: str = "/v1/images/generations", **fields: Any) -> Answer:
    return await stage.post(path, json={"prompt": "a red barn"} | fields)


async def test_a_generation_is_answered_in_openais_form(painter: Stage) -> None:
    asked: dict[str, Any] = {"n": 2, "seed": 7, "size": "64x48", "output_format": "webp", "user": None}
    answer = (await generated(painter, **asked)).expect(200).json
    assert [base64.b64decode(item["b64_json"]) for item in answer["data"]] == [picture_of(0), picture_of(1)]
    ImagesResponse.model_validate(answer, strict=True)
    assert answer["usage"]["input_tokens_details"] == {
        "text_tokens": 48,
        "image_tokens": 0,
        "prompt_tokens": {"given": 60, "read": 47},
        "negative_prompt_tokens": None,
    }
    job = (await painter.record()).job
    assert (job.image, job.mask, job.template_id, job.task) == (None, None, None, Task.GENERATE)
    assert job.model == "flux"  # the only one that generates
    used = job.parameters
    assert (used.strength, used.reuse, used.guidance_scale) == (1.0, Reuse.OFF, 3.5)
    assert used.num_inference_steps == 5


async def test_a_job_whose_body_is_json_is_a_generation(painter: Stage) -> None:
    status, view = (await generated(painter, "/v1/jobs", partial_images=1)).told
    assert (status, view["object"]) == (202, "image_generation.job")
    told = ((await painter.get(f"/v1/jobs/{view['id']}/events")).body).decode()
    assert "event: image_generation.completed" in told
    assert "image_edit" not in told
    assert (await painter.get(f"/v1/jobs/{view['id']}")).json["state"] == JobState.COMPLETED


async def test_the_nats_door_generates(painter: Stage, nats_url: str) -> None:
    async with giornata.client.connect(nats_url) as client:
        painter.router.steps_when = asyncio.Event()
        job = await client.generate(prompt="a red barn", n=2, seed=4)
        painter.router.steps_when.set()
        steps = [event.step async for event in job if isinstance(event, StepEvent)]
        result = await job
        assert steps == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
        assert [(one.seed, one.data) for one in result.pictures] == [(4, picture_of(0)), (5, picture_of(1))]
        assert (await painter.record()).job.image is None
        with pytest.raises(InvalidField, match="belong to edits"):
            await client.generate(prompt="a red barn", strength=0.5)
        with pytest.raises(TaskNotSupported) as refused:
            await client.generate(prompt="a red barn", model="tiny")
        assert refused.value.accepted == "flux"


@pytest.mark.parametrize(
    ("fields", "code", "param", "accepted"),
    [
        ({"strength": 0.5}, "invalid_field", "strength", "leave strength out, or ask for an edit"),
        ({"mask": "aGk="}, "invalid_field", "mask", "leave mask out, or ask for an edit"),
        ({"style": "bold"}, "invalid_field", "style", None),
        ({"guidance_rescale": 0.7}, "unknown_field", "guidance_rescale", None),
        ({"sampler": "ddim"}, "invalid_field", "sampler", "euler"),
        ({"size": "1000x1000"}, "size_mismatch", "size", "auto, or multiples of 16, such as 992x992"),
        ({"model": "tiny"}, "task_not_supported", "model", "flux"),
        ({"model": "absent"}, "model_not_found", "model", "flux, tiny"),
        ({"partial_images": 1}, "invalid_field", "partial_images", None),
        ({"prompt": ["a"]}, "invalid_field", "prompt", None),
        ({"stream": True, "response_format": "url"}, "invalid_field", "stream", None),
    ],
)
async def test_refusals_name_the_field_and_what_is_accepted(
    painter: Stage, fields: dict[str, Any], code: str, param: str, accepted: str | None
) -> None:
    answer = await generated(painter, **fields)
    told = answer.error
    assert (answer.status // 100, told["code"], told["param"]) == (4, code, param)
    assert accepted is None or told["accepted"] == accepted
    assert painter.router.submitted == set()


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b'{"prompt": NaN}', b'{"prompt": "x", "prompt": "y"}', b"[" * 9_000, b"\xff", b'"x"',
     b'{"prompt": "' + b"x" * (1 << 18) + b'"}', b'{"' + b"n" * 65 + b'": 1}', b'{"prompt": "\\ud800"}'],
    ids=range(11),
)  # fmt: skip
async def test_a_body_that_is_no_request_is_refused(painter: Stage, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    for path in ("/v1/images/generations", "/v1/jobs"):
        answer = await painter.post(path, data=body, headers=headers)
        assert answer.status in {400, 413}, answer.text
        assert answer.error["code"]


async def test_a_form_is_no_generation_and_a_fill_model_says_who_generates(stage: Stage) -> None:
    answer = await stage.post("/v1/images/generations", data=stage.form())
    assert (answer.status, answer.error["accepted"]) == (400, "application/json")
    answer = await generated(stage)
    assert answer.code == (400, "task_not_supported")
    assert "tiny (flux-fill)" in answer.error["message"]
    (told,) = (await stage.get("/v1/models")).json["data"]
    assert (told["tasks"], told["size_multiple"], told["generation_guidance_scale"]) == (["edit"], 16, None)


async def test_edits_choose_among_all_models_and_generations_among_their_own(painter: Stage) -> None:
    answer = await painter.edit()
    assert (answer.status, answer.error["accepted"]) == (400, "flux, tiny")
    assert (await painter.edit(model="flux")).status == 200
    asked = (await painter.record()).job.parameters
    assert (asked.guidance_scale, asked.num_inference_steps) == (7.0, 3)
    painter.router.failure = GiornataError("It failed.")
    assert (await generated(painter)).status == 500


async def test_a_variation_is_refused_and_told_what_comes_nearest(painter: Stage) -> None:
    form = multipart(("image", b"picture"), n="2")
    answer = await painter.post("/v1/images/variations", data=form)
    assert answer.code == (400, "task_not_supported")
    assert "/v1/images/edits" in answer.error["accepted"]
    assert painter.router.submitted == set()


# Pictures beside an edit's own, references and control images, through both doors in front of a scripted
# router.


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
