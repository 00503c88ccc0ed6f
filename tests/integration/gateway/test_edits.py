"""`POST /v1/images/edits` in front of a scripted router."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import aiohttp
import openai
import pytest
from openai.types import ImagesResponse

from giornata.wire.errors import MaskEmpty, QueueFull, RowPoisoned
from giornata.wire.jobs import JobState
from tests.integration.fake_router import COMPUTE, STAGES, picture_of
from tests.integration.gateway.repeating import stored
from tests.integration.gateway_fakes import Opening, Stage, leave
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


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"n": "11"}, "invalid_field", "n"),
        ({"stile": "x"}, "unknown_field", "stile"),
        ({"response_format": "image", "n": "2"}, "invalid_field", "response_format"),
        ({"model": "other"}, "model_not_found", "model"),
    ],
)
async def test_bad_fields_are_refused_by_name(
    stage: Stage, fields: dict[str, str], code: str, param: str
) -> None:
    answer = await stage.edit(**fields)
    assert answer.status == (404 if code == "model_not_found" else 400)
    assert (answer.error["code"], answer.error["param"]) == (code, param), answer.text
    assert not stage.router.jobs


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
