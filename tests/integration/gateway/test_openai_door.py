"""What clients of OpenAI's image API send today, as their own code or their logs have it, and what they are told."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from giornata.wire.models import Task
from giornata.wire.requests import MAX_SEED
from tests.integration.fake_router import CARD, picture_of
from tests.integration.gateway_fakes import Answer, Opening, Stage
from tests.present import present

PICTURE = "data:image/png;base64," + base64.b64encode(b"picture").decode()
OTHER = "data:image/png;base64," + base64.b64encode(b"other").decode()
UNREAD = {
    "moderation": "low", "input_fidelity": "high", "style": "vivid", "complexity": "low", "safety_identifier": "u1",
}  # fmt: skip
PAINTER = CARD.model_copy(
    update={"tasks": tuple(Task), "generation_guidance_scale": 3.5, "default_steps": 5, "max_references": 15}
)


@pytest_asyncio.fixture(loop_scope="module")
async def door(stage: Stage) -> Stage:
    """A stage whose model edits, generates, and looks at as many pictures as any."""
    await stage.serve(PAINTER)
    return stage


@pytest_asyncio.fixture(loop_scope="module")
async def client(door: Stage) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def post(stage: Stage, body: dict[str, Any], path: str = "edits") -> Answer:
    return await stage.post(f"/v1/images/{path}", json=body)


async def test_every_field_of_openais_client_is_taken_and_those_without_effect_are_told(
    door: Stage, client: openai.AsyncOpenAI
) -> None:
    edited = await client.images.with_raw_response.edit(
        image=[("a.png", b"picture"), ("b.png", b"other")],
        mask=("mask.png", b"mask"),
        prompt="a scarf",
        background="opaque",
        input_fidelity="high",
        model="tiny",
        n=2,
        output_compression=90,
        output_format="png",
        quality="high",
        response_format="b64_json",
        size="auto",
        user="me",
        extra_body={"moderation": "low", "style": "natural", "safety_identifier": "u1"},
    )
    told = edited.headers["X-Giornata-Ignored"]
    assert told == "output_compression, moderation, input_fidelity, style, safety_identifier"
    answer = edited.parse()
    assert (answer.quality, answer.background, len(answer.data or [])) == ("high", "opaque", 2)
    parameters = (await door.record()).job.parameters
    assert (parameters.num_inference_steps, parameters.reuse) == (8, "off")
    assert (parameters.output_compression, parameters.background, parameters.user) == (None, "opaque", "me")

    made = await client.images.with_raw_response.generate(
        prompt="a barn",
        background="auto",
        moderation="auto",
        output_compression=80,
        output_format="jpeg",
        quality="low",
        style="vivid",
        user="me",
    )
    assert made.headers["X-Giornata-Ignored"] == "moderation, style"
    assert made.parse().quality == "low"
    parameters = (await door.record()).job.parameters
    assert (parameters.num_inference_steps, parameters.output_compression) == (3, 80)

    plain = await client.images.with_raw_response.edit(image=b"picture", prompt="a scarf")
    assert "X-Giornata-Ignored" not in plain.headers
    assert plain.parse().quality == "medium"


async def test_the_request_itself_goes_before_its_quality(door: Stage) -> None:
    answer = await door.edit(quality="high", num_inference_steps="2", reuse="auto")
    assert (answer.status, answer.json["quality"], answer.json["giornata"]["steps"]) == (200, "high", 2)
    status, answer = (await door.edit(quality="standard")).told
    assert (status, answer["quality"], answer["giornata"]["steps"]) == (200, "medium", 5)
    assert answer["giornata"]["reuse"] == "auto"


async def test_a_form_says_in_many_ways_what_it_leaves_out(door: Stage) -> None:
    """LiteLLM writes None as an empty part; forms of browsers write an empty file without a name."""
    empty = dict.fromkeys(("n", "size", "quality", "user"), "")
    form = door.form(None, None, ("image[]", b"picture"), ("image[]", b"other"), model="tiny", **empty)
    form.add_field("mask", io.BytesIO(b""), filename="", content_type="application/octet-stream")
    assert (await door.post("/v1/images/edits", data=form)).status == 200
    job = (await door.record()).job
    assert (job.mask, len(job.references)) == (None, 1)


async def test_open_webui_is_served(door: Stage) -> None:
    asked = {"model": "tiny", "n": "1", "background": "transparent", "response_format": "b64_json"}
    form = door.form(b"picture", None, **asked)
    assert (await door.post("/v1/images/edits?api-version=2025-04-01-preview", data=form)).status == 200
    assert (await door.record()).job.parameters.background == "transparent"
    body = {"model": "tiny", "prompt": "a barn", "n": 1, "size": "512x512", "response_format": "b64_json"}
    answer = await post(door, body, "generations")
    assert (answer.status, base64.b64decode(answer.json["data"][0]["b64_json"])) == (200, picture_of(0))


async def test_images_and_masks_may_have_either_name_and_there_may_be_sixteen(door: Stage) -> None:
    for name in ("image", "image[]"):
        files = [(name, bytes([65 + index])) for index in range(16)]
        form = door.form(None, None, *files, ("mask[]", b"mask"))
        assert (await door.post("/v1/images/edits", data=form)).status == 200
        job = (await door.record()).job
        assert job.mask is not None
        stored = [await door.router.blobs.get(ref) for ref in (present(job.image), *job.references)]
        assert stored == [bytes([65 + index]) for index in range(16)]


@pytest.mark.parametrize("count", [9, 15])
async def test_more_references_than_the_model_takes_are_refused_with_its_number(
    stage: Stage, count: int
) -> None:
    eight, more = (CARD.model_copy(update={"name": f"m{most}", "max_references": most}) for most in (8, 15))
    await stage.serve(eight, more)
    body = {"prompt": "a scarf", "model": "m8", "images": [{"image_url": PICTURE}] * (1 + count)}
    answer = await post(stage, body)
    assert answer.refusal == (400, "invalid_field", "reference")
    assert answer.error["received"] == f"{count} pictures"
    assert answer.error["accepted"] == "at most 8; models that take so many: m15"


async def test_an_edit_may_be_json(door: Stage) -> None:
    body = {
        "prompt": "a scarf",
        "images": [{"image_url": PICTURE}, {"image_url": OTHER}],
        "mask": {"image_url": OTHER},
        "n": 1,
        "stream": False,
        "quality": None,
        **UNREAD,
    }
    answer = (await door.post("/v1/images/edits", json=body)).expect(200)
    assert answer.headers["X-Giornata-Ignored"] == ", ".join(UNREAD)
    job = (await door.record()).job
    stored = [
        await door.router.blobs.get(ref) for ref in (present(job.image), present(job.mask), *job.references)
    ]
    assert stored == [b"picture", b"other", b"other"]


@pytest.mark.parametrize(
    ("pictures", "code", "param"),
    [
        ({"images": [{"file_id": "file-1"}]}, "invalid_field", "images"),
        ({"images": [{}]}, "invalid_field", "images"),
        ({"images": [{"image_url": PICTURE, "detail": "high"}]}, "invalid_field", "images.0.detail"),
        ({"images": []}, "invalid_field", "image"),
        ({"images": PICTURE}, "invalid_field", "images"),
        ({"images": [{"image_url": PICTURE}] * 17}, "invalid_field", "images"),
        ({"images": [{"image_url": "https://example.com/a.png"}]}, "invalid_field", "images"),
        ({"images": [{"image_url": "data:image/png;base64,%"}]}, "invalid_field", "images"),
        ({"images": [{"image_url": PICTURE}], "mask": {"file_id": "file-1"}}, "invalid_field", "mask"),
        ({"image": PICTURE}, "unknown_field", "image"),
    ],
)
async def test_pictures_of_json_are_refused_by_name(
    door: Stage, pictures: dict[str, Any], code: str, param: str
) -> None:
    assert (await post(door, {"prompt": "a scarf", **pictures})).refusal == (400, code, param)
    assert not door.router.jobs


async def test_pictures_come_from_allowed_hosts_alone(opening: Opening, tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def served(request: web.Request) -> web.StreamResponse:
        match request.path:
            case "/a.png":
                return web.Response(body=b"picture")
            case "/large.png":
                return web.Response(body=bytes(4096))
            case "/moved.png":
                raise web.HTTPFound("/a.png")
            case "/empty.png":
                return web.Response()
        asked.set()
        raise web.HTTPNotFound

    app = web.Application()
    app.router.add_get("/{name}", served)
    async with TestServer(app) as server:
        here, there = f"http://127.0.0.1:{server.port}", f"http://localhost:{server.port}"
        options = {"image_hosts": f"127.0.0.1:{server.port}, example.com", "max_file_bytes": 1024}
        async with opening(webhook_networks="127.0.0.0/8,::1/128", **options) as stage:
            named = {"prompt": "a scarf", "images": [{"image_url": f"{here}/a.png"}]}
            assert (await post(stage, named)).status == 200
            job = (await stage.record()).job
            assert await stage.router.blobs.get(present(job.image)) == b"picture"
            for url, status, why in (
                (f"{here}/large.png", 413, "too large"),
                (f"{here}/moved.png", 400, "status 302"),
                (f"{here}/empty.png", 400, "0 bytes"),
                (f"{here}/none.png", 400, "status 404"),
                (f"{here}/none.png?{'key=' * 60}", 400, "status 404"),
                (f"{there}/a.png", 400, f"a URL at 127.0.0.1:{server.port}, example.com"),
            ):
                answer = await post(stage, {"prompt": "x", "images": [{"image_url": url}]})
                assert answer.fault == (status, "images"), answer.text
                assert why in str(answer.error), answer.text
            assert asked.is_set()
            asked.clear()
            given = {"prompt": "x", "images": [{"image_url": f"{here}/none.png"}], "template_id": "tpl_1"}
            assert (await post(stage, given)).fault == (400, "template_id")
            assert not asked.is_set(), "what is refused anyway is not fetched"
        async with opening(**options) as stage:
            answer = await post(stage, {"prompt": "x", "images": [{"image_url": f"{here}/none.png"}]})
            assert (answer.status, answer.error["message"]) == (
                400,
                "A picture cannot be fetched from there.",
            )
            secure = f"https://127.0.0.1:{server.port}/none.png"
            assert (await post(stage, {"prompt": "x", "images": [{"image_url": secure}]})).status == 400
        assert not asked.is_set(), "an address of this machine is no public one"


async def test_long_prompts_are_taken(door: Stage, client: openai.AsyncOpenAI) -> None:
    longest, faces = "x" * 32_000, "\N{GRINNING FACE}" * 9_000  # four bytes each, the most that UTF-8 has
    for prompt in (longest, faces):
        answer = await client.images.edit(image=b"picture", prompt=prompt)
        assert answer.data
        assert (await door.record()).job.parameters.prompt == prompt
        assert (await post(door, {"prompt": prompt}, "generations")).status == 200
    for prompt, why in ((longest + "x", "32000 characters"), (faces + "x", "36001 bytes")):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.images.generate(prompt=prompt)
        assert (refused.value.code, refused.value.param) == ("invalid_field", "prompt")
        assert why in refused.value.message


async def test_streams_tell_what_openais_client_knows_alone(door: Stage, client: openai.AsyncOpenAI) -> None:
    kinds = [
        event.type async for event in await client.images.edit(image=b"x", prompt="a scarf", stream=True)
    ]
    assert kinds == ["image_edit.completed"]
    stream = await client.images.generate(prompt="a barn", stream=True, partial_images=1)
    shown = {event.type async for event in stream}
    assert shown == {"image_generation.partial_image", "image_generation.completed"}


async def test_every_answer_has_an_id_of_its_request(door: Stage, client: openai.AsyncOpenAI) -> None:
    answer = await client.images.edit(image=b"picture", prompt="a scarf")
    assert (answer._request_id or "").startswith("req_")
    with pytest.raises(openai.NotFoundError) as missed:
        await client.models.retrieve("absent")
    assert (missed.value.request_id or "").startswith("req_")
    for given, told in (("trace-7", "trace-7"), ("no good id", None), ("x" * 200, None)):
        echoed = await door.get("/v1/models", headers={"X-Request-Id": given})
        assert (echoed.headers["X-Request-Id"] == told) == (told is not None)


async def test_pages_of_configured_origins_may_call(opening: Opening, tmp_path: Path) -> None:
    page, stranger = "https://app.example", "https://other.example"
    async with opening(cors_origins=f"{page}, http://localhost:3000") as stage:
        for origin, may in ((page, True), (stranger, False)):
            headers = {
                "Origin": origin,
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization,x-stainless-os",
            }
            answer = await stage.ask("OPTIONS", "/v1/images/edits", headers=headers)
            assert answer.headers["Vary"] == "Origin"
            assert answer.status == (204 if may else 405)
            assert answer.headers.get("Access-Control-Allow-Origin") == (origin if may else None)
            allowed = answer.headers.get("Access-Control-Allow-Headers")
            assert allowed == ("authorization,x-stainless-os" if may else None)
            headers = {"Origin": origin, "Sec-Fetch-Site": "cross-site"}
            answer = await stage.post("/v1/images/edits", data=stage.form(), headers=headers)
            assert answer.status == (200 if may else 403)
            assert answer.headers["Vary"] == "Origin"
            assert answer.headers.get("Access-Control-Allow-Origin") == (origin if may else None)
            assert ("X-Request-Id" in answer.headers.get("Access-Control-Expose-Headers", "")) == may
        answer = await stage.get("/v1/models")
        assert (answer.status, answer.headers["Vary"]) == (200, "Origin")
    async with opening() as stage, stage.http.get("/v1/models", headers={"Origin": page}) as response:
        assert (response.status, "Vary" in response.headers) == (200, False)


async def test_every_seed_that_is_told_can_be_asked_for(door: Stage) -> None:
    for first in (0, 2**53, MAX_SEED - 1):
        answer = (await door.edit(n="3", seed=str(first))).json
        seeds = answer["giornata"]["seeds"]
        assert seeds == [(first + index) % (MAX_SEED + 1) for index in range(3)]
        for seed in seeds:
            again = await door.edit(seed=str(seed))
            assert (again.status, again.json["giornata"]["seeds"]) == (200, [seed])
