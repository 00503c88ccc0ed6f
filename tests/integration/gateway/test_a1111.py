"""A1111's API in front of a scripted router."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
import pytest_asyncio
import webuiapi
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # has no types

from giornata.wire.adapters import Annotator, ControlCard, ControlKind
from giornata.wire.errors import SizeMismatch
from giornata.wire.models import Sampler
from giornata.wire.requests import MaskMode
from giornata_gateway.http.a1111 import A1111_ROUTES
from tests.fakes.fleet import SDXL
from tests.integration.fake_router import CARD, picture_of
from tests.integration.gateway_fakes import Answer, Opening, Stage
from tests.present import present

IMAGE = base64.b64encode(b"picture").decode()
MASK = base64.b64encode(b"mask").decode()
EDIT: dict[str, Any] = {"prompt": "a red star", "init_images": [IMAGE], "mask": MASK, "seed": 7}


@pytest_asyncio.fixture(loop_scope="module")
async def painter(stage: Stage) -> Stage:
    """A gateway whose fleet has a Fill model, and one with classifier-free guidance that generates."""
    await stage.serve(CARD, SDXL)
    return stage


async def post(stage: Stage, path: str, body: object, **headers: str) -> Answer:
    return await stage.post(f"/sdapi/v1/{path}", json=body, headers=headers)


async def get(stage: Stage, path: str, **headers: str) -> Any:
    asked = path if path[0] == "/" else f"/sdapi/v1/{path}"
    return (await stage.get(asked, headers=headers)).expect(200).json


async def test_an_edit_keeps_its_trace(stage: Stage) -> None:
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    assert (await post(stage, "img2img", EDIT, traceparent=trace)).status == 200
    assert (await stage.record()).job.traceparent == trace


async def test_an_edit_becomes_a_job_and_is_answered_in_a1111s_form(stage: Stage) -> None:
    asked = EDIT | {
        "batch_size": 2,
        "steps": 6,
        "mask_blur": 3,
        "inpainting_fill": 1,
        "denoising_strength": 0.6,
        "inpaint_full_res_padding": 24,
        "inpainting_mask_invert": 1,
        "sampler_name": "Euler a",
        "cfg_scale": 7,
        "distilled_cfg_scale": 12,
        "width": 512,
        "height": 512,
    }
    answer = (await post(stage, "img2img", asked)).expect(200).json
    assert [base64.b64decode(image) for image in answer["images"]] == [picture_of(0), picture_of(1)]
    assert answer["parameters"]["prompt"] == "a red star"
    assert "init_images" not in answer["parameters"]
    info = json.loads(answer["info"])
    assert (info["prompt_tokens"], info["negative_prompt_tokens"]) == ({"given": 60, "read": 47}, None)
    assert (info["all_seeds"], info["steps"], info["denoising_strength"]) == ([7, 8], 6, 0.6)
    assert info["infotexts"][1].splitlines()[1].startswith("Steps: 6, Sampler: Euler, CFG scale: 12, Seed: 8")
    job = (await stage.record()).job
    assert info["job_id"] == job.job_id
    told = job.parameters
    assert (told.n, told.num_inference_steps, told.mask_blur, told.strength) == (2, 6, 3.0, 0.6)
    assert (told.padding_mask_crop, told.mask_mode, told.size) == (24, MaskMode.BLACK, "auto")
    assert (told.sampler, told.guidance_scale) == (Sampler.EULER, 12.0)
    assert await stage.router.blobs.get(present(job.image)) == b"picture"
    assert await stage.router.blobs.get(present(job.mask)) == b"mask"


@pytest.mark.parametrize(
    ("change", "code", "field", "received"),
    [
        ({"restore_faces": True}, "invalid_field", "restore_faces", "true"),
        ({"inpainting_fill": 0, "denoising_strength": 0.4}, "invalid_field", "denoising_strength", "0.4"),
        ({"inpainting_fill": 4}, "invalid_field", "inpainting_fill", "4"),
        ({"denoising_strength": 0}, "invalid_field", "denoising_strength", "0"),
        ({"negative_prompt": "blue"}, "invalid_field", "negative_prompt", "a text"),
        ({"width": 768, "height": 512}, "invalid_field", "width", "768x512"),
        ({"width": 768}, "invalid_field", "request", None),
        ({"batch_size": 4, "n_iter": 4}, "invalid_field", "request", None),
        ({"override_settings": {"sd_model_checkpoint": "v1-5"}}, "model_not_found",
         "override_settings.sd_model_checkpoint", "v1-5"),
        ({"override_settings": {"sd_vae": "ours.pt"}}, "invalid_field", "override_settings.sd_vae", "'ours.pt'"),
        ({"alwayson_scripts": {"ControlNet": {"args": [{"model": "c", "module": "canny"}]}}},
         "controlnet_not_found", "alwayson_scripts.controlnet", "c"),
        ({"prompt": "a <lora:gone:0.5> star"}, "lora_not_found", "prompt", "gone"),
        ({"prompt": "a (red:1.3) star"}, "invalid_field", "prompt", "(red:1.3)"),
        ({"prompt": ""}, "invalid_field", "prompt", ""),
        ({"init_images": []}, "invalid_field", "init_images", None),
        ({"init_images": ["?"]}, "invalid_field", "init_images", None),
        ({"mask": "?"}, "invalid_field", "mask", None),
    ],
)  # fmt: skip
async def test_what_has_no_meaning_is_refused_by_its_name(
    stage: Stage, change: dict[str, Any], code: str, field: str | None, received: str | None
) -> None:
    status, answer = (await post(stage, "img2img", EDIT | change)).told
    error = answer["error"]
    assert 400 <= status < 500, answer
    assert error["code"] == code, answer
    if field is not None:
        assert error["param"] == field, answer
    if received is not None:
        assert error["received"] == received, answer
    assert stage.router.jobs == {}


async def test_a_failed_job_names_a1111s_field(stage: Stage) -> None:
    stage.router.failure = SizeMismatch(field="size", received="64x64", accepted="64x48")
    answer = await post(stage, "img2img", EDIT | {"inpaint_full_res": False, "width": 64, "height": 64})
    assert answer.refusal == (400, "size_mismatch", "width")
    assert (await stage.record()).job.parameters.size == "64x64"


async def test_controlnets_are_units_of_the_extension(stage: Stage) -> None:
    card = ControlCard(name="outline", digest="o" * 64, kind=ControlKind.FLUX, text_channels=32)
    stage.router.controlnets = {"tiny": (card,)}
    await stage.router.announce()
    units = [
        webuiapi.ControlNetUnit(model="outline [00000000]", weight=0.5, guidance_end=0.8).to_dict()
        | {"image": base64.b64encode(b"lines").decode()},
        webuiapi.ControlNetUnit(module="canny", model="outline").to_dict(),
        {"enabled": False, "model": "none", "module": "openpose"},
    ]
    (await post(stage, "img2img", EDIT | {"alwayson_scripts": {"ControlNet": {"args": units}}})).expect(200)
    job = (await stage.record()).job
    seen, made = job.controls
    assert (seen.model, seen.image, seen.annotator, seen.scale, seen.end) == ("outline", 0, None, 0.5, 0.8)
    assert (made.model, made.image, made.annotator, made.scale) == ("outline", None, Annotator.CANNY, 1.0)
    assert [await stage.router.blobs.get(ref) for ref in job.control_images] == [b"lines"]


async def test_options_are_not_kept(painter: Stage) -> None:
    answer = await post(painter, "options", {"sd_model_checkpoint": "tiny"})
    assert answer.fault == (400, "sd_model_checkpoint")
    await painter.serve(CARD)
    assert (await get(painter, "options"))["sd_model_checkpoint"] == "tiny [dddddddddd]"
    for title in ("tiny", "tiny [dddddddddd]", "d" * 10):
        assert (await post(painter, "options", {"sd_model_checkpoint": title})).told == (200, {})
    answer = await post(painter, "options", {"sd_model_checkpoint": "sdxl"})
    assert answer.fault == (400, "sd_model_checkpoint")


async def test_options_may_name_a_model_by_its_alias(opening: Opening) -> None:
    aliases = "sdxl=tiny, lost=away, again=sdxl"
    async with opening(model_aliases=aliases) as stage:
        for name, expected in (("tiny", 200), ("sdxl", 200), ("lost", 400), ("again", 400), ("other", 400)):
            assert (await post(stage, "options", {"sd_model_checkpoint": name})).status == expected
        for name, stands in (("lost", "away"), ("again", "sdxl")):
            answer = await post(
                stage, "txt2img", {"prompt": "x", "override_settings": {"sd_model_checkpoint": name}}
            )
            assert answer.code == (404, "model_not_found")
            assert f"stands for {stands}. Served: tiny" in answer.error["message"]


async def test_a_gateway_may_be_without_it(opening: Opening) -> None:
    async with opening(a1111=False) as stage:
        assert (await stage.get("/sdapi/v1/options")).status == 404
        answer = await stage.get("/openapi.json")
        assert not [path for path in answer.json["paths"] if path.startswith(("/sdapi", "/controlnet"))]


async def test_answers_are_as_documented(stage: Stage) -> None:
    document = (await stage.get("/openapi.json")).json
    from openapi_spec_validator import validate  # noqa: PLC0415 - takes two seconds to load

    validate(document)
    assert {"/v1/images/edits", "/v1/jobs/{job_id}/events", "/healthz"} <= set(document["paths"])
    fields = document["components"]["schemas"]["EditForm"]["properties"]
    assert {"image", "mask", "prompt", "mask_mode", "response_format", "stream"} <= set(fields)
    assert "`mask_empty`" in document["info"]["description"]
    for route in A1111_ROUTES:
        told = document["paths"][route.path][route.method.lower()]
        assert ("403" in told["responses"]) == (route.method != "GET")
    schemas = {"components": document["components"]}
    listings = [route.path for route in A1111_ROUTES if route.method == "GET"]
    assert {"/sdapi/v1/schedulers", "/sdapi/v1/upscalers", "/controlnet/model_list"} < set(listings)
    for path in listings:
        told = document["paths"][path]["get"]
        assert told["security"] == [{}, {"bearer": []}, {"basic": []}]
        schema = told["responses"]["200"]["content"]["application/json"]["schema"]
        Draft202012Validator(schemas | schema).validate(await get(stage, path))
        assert told["operationId"].startswith("a1111")
    body = document["paths"]["/sdapi/v1/img2img"]["post"]["requestBody"]["content"]["application/json"]
    check = Draft202012Validator(schemas | body["schema"])
    check.validate(EDIT | {"restore_faces": None, "subseed": 5})
    assert not check.is_valid(EDIT | {"restore_faces": True})
