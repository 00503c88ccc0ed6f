"""Pictures from text through both doors in front of a scripted router."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest
import pytest_asyncio
from openai.types import ImagesResponse

import giornata.client
from giornata.wire.errors import GiornataError, InvalidField, TaskNotSupported
from giornata.wire.jobs import JobState
from giornata.wire.messages import StepEvent
from giornata.wire.models import Task
from giornata.wire.requests import Reuse
from tests.integration.fake_router import CARD, PAINTER, picture_of
from tests.integration.gateway_fakes import Answer, Stage, multipart

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
