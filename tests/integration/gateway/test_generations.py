"""Pictures from text through both doors in front of a scripted router."""

from __future__ import annotations

import asyncio
import base64
import io
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio
from openai.types import ImageGenCompletedEvent, ImageGenPartialImageEvent, ImagesResponse

import giornata.client
from giornata.families import Family
from giornata.wire.errors import GiornataError, InvalidField, TaskNotSupported
from giornata.wire.jobs import JobState
from giornata.wire.messages import StepEvent
from giornata.wire.models import Task
from giornata.wire.requests import Reuse
from tests.integration.fake_router import CARD, picture_of
from tests.integration.gateway_fakes import Stage

FLUX = CARD.model_copy(
    update={
        "name": "flux",
        "family": Family.FLUX_INPAINT,
        "digest": "f" * 64,
        "takes_true_cfg": True,
        "default_strength": 0.6,
        "default_guidance_scale": 7.0,
        "tasks": (Task.EDIT, Task.GENERATE),
        "generation_guidance_scale": 3.5,
        "generation_steps": 5,
    }
)


@pytest_asyncio.fixture(loop_scope="module")
async def painter(stage: Stage) -> Stage:
    """A gateway whose fleet has a Fill model, and one that generates."""
    stage.router.cards = (CARD, FLUX)
    await stage.router.announce()
    return stage


async def generated(stage: Stage, path: str = "/v1/images/generations", **fields: Any) -> tuple[int, Any]:
    return (await stage.post(path, json={"prompt": "a red barn"} | fields)).told


async def test_a_generation_is_answered_in_openais_form(painter: Stage) -> None:
    status, answer = await generated(painter, n=2, seed=7, size="64x48", output_format="webp", user=None)
    assert status == 200, answer
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
    asked = job.parameters
    assert (asked.strength, asked.reuse, asked.guidance_scale) == (1.0, Reuse.OFF, 3.5)
    assert asked.num_inference_steps == 5


async def test_the_official_client_generates_and_is_told_of_it(painter: Stage) -> None:
    async with openai.AsyncOpenAI(base_url=f"{painter.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.images.generate(prompt="a red barn", model="flux", size="1024x1024", n=1)
        assert answer.data is not None
        assert base64.b64decode(answer.data[0].b64_json or "") == picture_of(0)
        painter.router.steps_when = asyncio.Event()
        stream = await client.images.generate(prompt="a red barn", stream=True, partial_images=2)
        painter.router.steps_when.set()
        told: list[Any] = [event async for event in stream]
    names = [event.type for event in told]
    assert names.count("image_generation.partial_image") == 2
    assert {name.split(".")[0] for name in names} == {"image_generation"}
    for event in told:
        if event.type == "image_generation.partial_image":
            ImageGenPartialImageEvent.model_validate(event.model_dump(), strict=True)
    ImageGenCompletedEvent.model_validate(told[-1].model_dump(), strict=True)


async def test_a_job_whose_body_is_json_is_a_generation(painter: Stage) -> None:
    status, view = await generated(painter, "/v1/jobs", partial_images=1)
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
    status, answer = await generated(painter, **fields)
    told = answer["error"]
    assert (status // 100, told["code"], told["param"]) == (4, code, param)
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
        async with painter.http.post(path, data=body, headers=headers) as response:
            assert response.status in {400, 413}, await response.text()
            assert (await response.json())["error"]["code"]


async def test_a_form_is_no_generation_and_a_fill_model_says_who_generates(stage: Stage) -> None:
    async with stage.http.post("/v1/images/generations", data=stage.form()) as response:
        assert (response.status, (await response.json())["error"]["accepted"]) == (400, "application/json")
    status, answer = await generated(stage)
    assert (status, answer["error"]["code"]) == (400, "task_not_supported")
    assert "tiny (flux-fill)" in answer["error"]["message"]
    (told,) = (await stage.get("/v1/models")).json["data"]
    assert (told["tasks"], told["size_multiple"], told["generation_guidance_scale"]) == (["edit"], 16, None)


async def test_edits_choose_among_all_models_and_generations_among_their_own(painter: Stage) -> None:
    status, answer = await painter.edit()
    assert (status, answer["error"]["accepted"]) == (400, "flux, tiny")
    assert (await painter.edit(model="flux"))[0] == 200
    asked = (await painter.record()).job.parameters
    assert (asked.guidance_scale, asked.num_inference_steps) == (7.0, 3)
    painter.router.failure = GiornataError("It failed.")
    assert (await generated(painter))[0] == 500


async def test_a_variation_is_refused_and_told_what_comes_nearest(painter: Stage) -> None:
    form = aiohttp.FormData({"n": "2"}, default_to_multipart=True)
    form.add_field("image", io.BytesIO(b"picture"), filename="image.png")
    async with painter.http.post("/v1/images/variations", data=form) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (400, "task_not_supported")
    assert "/v1/images/edits" in error["accepted"]
    assert painter.router.submitted == set()
