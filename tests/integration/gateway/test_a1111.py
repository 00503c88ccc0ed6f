"""A1111's API in front of a scripted router."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import webuiapi
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # has no types
from structlog.testing import capture_logs

from giornata.records import LoraRecords
from giornata.wire.adapters import Annotator, ControlCard, ControlKind
from giornata.wire.errors import SizeMismatch
from giornata.wire.jobs import JobState
from giornata.wire.loras import CanonicalLora, LoraRecord, LoraState, StoredFile
from giornata.wire.messages import JobEstimate
from giornata.wire.models import Sampler, Task
from giornata.wire.requests import EditParameters, MaskMode
from giornata_gateway.http.a1111 import A1111_ROUTES
from giornata_gateway.http.routes import ROUTES
from tests.fakes.fleet import SDXL
from tests.fakes.key_files import write_keys
from tests.integration.fake_router import CARD, picture_of
from tests.integration.gateway_fakes import Answer, Opening, Stage
from tests.patience import HUNG_S
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
        ({"width": 768}, "invalid_field", "request", None),
        ({"batch_size": 4, "n_iter": 4}, "invalid_field", "request", None),
        ({"override_settings": {"sd_model_checkpoint": "v1-5"}}, "model_not_found",
         "override_settings.sd_model_checkpoint", "v1-5"),
        ({"override_settings": {"sd_vae": "ours.pt"}}, "invalid_field", "override_settings.sd_vae", "'ours.pt'"),
        ({"alwayson_scripts": {"ControlNet": {"args": [{"model": "c", "module": "canny"}]}}},
         "controlnet_not_found", "alwayson_scripts.controlnet", "c"),
        ({"prompt": "a <lora:gone:0.5> star"}, "lora_not_found", "prompt", "gone"),
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
    card = ControlCard(name="outline", digest="0123abcd" * 8, kind=ControlKind.FLUX, text_channels=32)
    stage.router.controlnets = {"tiny": (card,)}
    await stage.router.announce()
    [listed] = (await get(stage, "/controlnet/model_list"))["model_list"]
    units = [
        webuiapi.ControlNetUnit(model=listed, weight=0.5, guidance_end=0.8).to_dict()
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


# What clients of A1111's API send by themselves: SillyTavern, Open WebUI, Forge's page, and `webuiapi`.


FLUX = CARD.model_copy(update={"tasks": (Task.EDIT, Task.GENERATE), "generation_guidance_scale": 3.5})
SILLY_TAVERN: dict[str, Any] = {
    "url": "http://127.0.0.1:7860", "auth": "anybody:sk-secret", "prompt": "a red star", "negative_prompt": "",
    "sampler_name": "DDIM", "scheduler": "normal", "steps": 20, "cfg_scale": 7, "width": 512, "height": 512,
    "restore_faces": False, "enable_hr": False, "hr_upscaler": "Latent", "hr_scale": 1, "hr_additional_modules": [],
    "denoising_strength": 0.7, "hr_second_pass_steps": 0, "override_settings": {"CLIP_stop_at_last_layers": 1},
    "override_settings_restore_afterwards": True, "clip_skip": 1, "save_images": True, "send_images": True,
    "do_not_save_grid": False, "do_not_save_samples": False,
}  # fmt: skip
"""The fields of `generateAutoImage` in its extension stable-diffusion, with its defaults."""
OPEN_WEBUI: dict[str, Any] = {
    "prompt": "a red star", "batch_size": 1, "width": 512, "height": 512, "steps": 50, "negative_prompt": "",
    "cfg_scale": 7, "sampler_name": "Euler a", "scheduler": "Automatic",
}  # fmt: skip
"""The fields of its router `images`, with the parameters that an administrator may add."""
UNIT: dict[str, Any] = {
    "batch_image_dir": "", "batch_input_gallery": None, "batch_mask_dir": "", "batch_mask_gallery": None,
    "control_mode": "Balanced", "enabled": False, "generated_image": None, "guidance_end": 1.0, "guidance_start": 0.0,
    "hr_option": "Both", "image": None, "image_fg": None, "input_mode": "simple", "mask_image": None,
    "mask_image_fg": None, "model": "None", "module": "None", "pixel_perfect": False, "processor_res": -1,
    "resize_mode": "Crop and Resize", "save_detected_map": True, "threshold_a": -1, "threshold_b": -1,
    "use_preview_as_input": False, "weight": 1,
}  # fmt: skip
FORGE: dict[str, Any] = {
    "prompt": "a red star", "negative_prompt": "", "steps": 20, "width": 512, "height": 512, "cfg_scale": 1,
    "batch_size": 1, "n_iter": 1, "sampler_name": "Euler", "scheduler": "Simple", "distilled_cfg_scale": 3.5,
    "denoising_strength": 0.7, "seed": -1, "seed_enable_extras": True, "subseed": -1, "subseed_strength": 0,
    "seed_resize_from_h": -1, "seed_resize_from_w": -1, "tiling": False, "restore_faces": False, "enable_hr": False,
    "hr_scale": 2, "hr_upscaler": "Latent", "hr_second_pass_steps": 0, "hr_resize_x": 0, "hr_resize_y": 0,
    "hr_prompt": "", "hr_negative_prompt": "", "hr_cfg": 1, "hr_distilled_cfg": 3.5, "styles": [],
    "override_settings": {}, "override_settings_restore_afterwards": True, "script_name": None, "script_args": [],
    "do_not_save_samples": False, "do_not_save_grid": False, "disable_extra_networks": False, "comments": {},
    "s_churn": 0.0, "s_min_uncond": 0.0, "s_noise": 1.0, "s_tmin": 0.0, "s_tmax": None,
    "alwayson_scripts": {
        "API payload": {"args": []},
        "ControlNet": {"args": [UNIT] * 3},
        "DynamicThresholding (CFG-Fix) Integrated": {"args": [False, 7, 1, "Constant", 0, "Constant", 0, 1]},
        "Extra options": {"args": []},
        "FreeU Integrated (SD 1.x, SD 2.x, SDXL)": {"args": [False, 1.01, 1.02, 0.99, 0.95, 0, 1]},
        "Never OOM Integrated": {"args": [False, False]},
        "Refiner": {"args": [False, "", 0.8]},
        "Sampler": {"args": [20, "Euler", "Simple"]},
        "Seed": {"args": [-1, False, -1, 0, 0, 0]},
        "StyleAlign Integrated": {"args": [False, 1]},
    },
}  # fmt: skip
"""The fields that Forge's extension `API payload` shows of a picture by Flux."""


async def painted(stage: Stage, body: dict[str, Any]) -> tuple[EditParameters, list[str]]:
    answer = (await post(stage, "txt2img", body)).expect(200)
    assert json.loads(answer.json["info"])["prompt"] == body["prompt"]
    return (await stage.record()).job.parameters, answer.ignored


@pytest_asyncio.fixture(loop_scope="module")
async def flux(stage: Stage) -> Stage:
    """A gateway whose fleet serves Flux alone."""
    await stage.serve(FLUX)
    return stage


@pytest_asyncio.fixture(loop_scope="module")
async def sdxl(stage: Stage) -> Stage:
    """A gateway whose fleet serves SDXL alone."""
    await stage.serve(SDXL)
    return stage


async def test_sillytaverns_body_is_accepted_and_tells_what_changes_nothing(flux: Stage) -> None:
    with capture_logs() as logs:
        parameters, ignored = await painted(flux, SILLY_TAVERN)
    assert ignored == ["url", "auth", "save_images", "cfg_scale", "sampler_name"]
    assert (parameters.sampler, parameters.num_inference_steps, parameters.size) == (
        Sampler.EULER,
        20,
        "512x512",
    )
    assert "sk-secret" not in repr(logs)
    told = [line["fields"] for line in logs if line["event"] == "fields_ignored"]
    assert told[-1] == "url, auth, save_images, cfg_scale, sampler_name"


async def test_sillytaverns_body_means_its_sampler_where_a_model_has_it(sdxl: Stage) -> None:
    parameters, ignored = await painted(sdxl, SILLY_TAVERN)
    assert ignored == ["url", "auth", "save_images"]
    assert (parameters.sampler, parameters.guidance_scale) == (Sampler.DDIM, 7.0)


async def test_open_webuis_requests_are_accepted(flux: Stage) -> None:
    options = await get(flux, "options")
    assert (await post(flux, "options", options | {"sd_model_checkpoint": "tiny"})).told == (200, {})
    parameters, ignored = await painted(flux, OPEN_WEBUI)
    assert (parameters.num_inference_steps, ignored) == (50, ["cfg_scale", "sampler_name"])


async def test_forges_body_of_flux_is_accepted_and_ignores_nothing(flux: Stage) -> None:
    parameters, ignored = await painted(flux, FORGE)
    assert ignored == []
    assert (parameters.sampler, parameters.guidance_scale) == (Sampler.EULER, 3.5)


async def test_emphasis_of_one_request_is_not_that_of_the_next(flux: Stage) -> None:
    body = OPEN_WEBUI | {"prompt": "a (red:1.3) star"}
    assert (await post(flux, "txt2img", body)).status == 400
    settings = {"override_settings": {"emphasis": "Ignore"}}
    assert (await post(flux, "txt2img", body | settings)).status == 200
    assert (await flux.record()).job.parameters.prompt == "a red star"
    assert (await post(flux, "options", {"emphasis": "Ignore"})).fault == (400, "emphasis")


async def test_skip_cancels_the_oldest_job_alone(stage: Stage) -> None:
    stage.router.hold = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        oldest = group.create_task(post(stage, "img2img", EDIT))
        await asyncio.wait_for(stage.router.held.wait(), HUNG_S)
        stage.router.held.clear()
        newer = group.create_task(post(stage, "img2img", EDIT | {"seed": 8}))
        await asyncio.wait_for(stage.router.held.wait(), HUNG_S)
        assert (await post(stage, "skip", None)).told == (200, {})
        assert (await oldest).code == (409, "job_cancelled")
        stage.router.go_on()
        assert (await newer).status == 200


# Whose jobs, LoRAs and keys A1111's API sees.


OPEN = {"/healthz", "/readyz", "/metrics", "/openapi.json"}
"""For probes and for readers of the API; they tell nothing of a tenant."""
LORA = f"lora_{'a' * 32}"
READY = LoraRecord(
    lora_id=LORA,
    tenant="",
    created_s=0,
    state=LoraState.READY,
    model=CARD.name,
    name="rims.safetensors",
    canonical=CanonicalLora(
        file=StoredFile(sha256="c" * 64, size_bytes=1234), model_digest=CARD.digest, rank=16, modules=40
    ),
)


def basic(key: str) -> str:
    return aiohttp.encode_basic_auth("anybody", key)


@pytest_asyncio.fixture(loop_scope="module")
async def doors(opening: Opening, tmp_path: Path) -> AsyncIterator[Stage]:
    """A gateway with the keys of two tenants."""
    alice, bob = (
        f"{name}-{secrets.token_hex(4)}" for name in ("alice", "bob")
    )  # other tests' records stay in NATS
    keys = write_keys(tmp_path, {"sk-alice-123": alice, "sk-robert-12": bob})
    async with opening(api_keys_file=keys) as stage:
        records = await LoraRecords.open(stage.router.bus.jetstream)
        await records.create(READY.model_copy(update={"tenant": alice}))
        yield stage


async def test_a_prompt_names_the_tenants_loras(doors: Stage) -> None:
    alice, bob = {"Authorization": basic("sk-alice-123")}, {"Authorization": basic("sk-robert-12")}
    assert [(one["name"], one["alias"]) for one in await get(doors, "loras", **alice)] == [("rims", LORA)]
    assert await get(doors, "loras", **bob) == []
    asked = EDIT | {"prompt": "a red <lora:rims:0.5> star"}
    (await post(doors, "img2img", asked, **alice)).expect(200)
    job = (await doors.record()).job
    assert job.parameters.prompt == "a red star"
    assert [(use.lora_id, use.scale) for use in job.loras] == [(LORA, 0.5)]
    assert (await post(doors, "img2img", asked, **bob)).code == (404, "lora_not_found")


async def test_progress_and_interrupt_see_the_tenants_own_jobs_alone(doors: Stage) -> None:
    doors.router.hold = asyncio.Event()
    alice, bob = {"Authorization": basic("sk-alice-123")}, {"Authorization": "Bearer sk-robert-12"}
    waiting = asyncio.create_task(post(doors, "img2img", EDIT | {"steps": 4}, **alice))
    await asyncio.wait_for(doors.router.held.wait(), HUNG_S)
    job = (await doors.record()).job
    silent = await get(doors, "progress", **alice)  # the router tells nothing of it
    assert (silent["progress"], silent["eta_relative"], silent["state"]["sampling_step"]) == (0.25, 0, 1)
    doors.router.forecast = JobEstimate(position=0, finish_ms=1500)
    own = await get(doors, "progress?skip_current_image=true", **alice)
    assert (own["progress"], own["eta_relative"], own["current_image"]) == (0.25, 1.5, None)
    assert own["state"]["job"] == own["current_task"] == job.job_id
    assert (own["state"]["job_count"], own["state"]["sampling_step"], own["state"]["sampling_steps"]) == (
        1,
        1,
        4,
    )
    assert (await get(doors, "progress", **bob))["state"]["job_count"] == 0
    assert (await post(doors, "interrupt", None, **bob)).told == (200, {})
    assert not (await doors.record()).cancel
    assert (await post(doors, "interrupt", None, **alice)).told == (200, {})
    assert (await waiting).code == (409, "job_cancelled")
    assert (await doors.record()).state is JobState.CANCELLED
    assert (await get(doors, "progress", **alice))["state"]["job_count"] == 0


async def test_every_route_wants_a_key(doors: Stage) -> None:
    named = {"{job_id}": "job_1", "{template_id}": "template_1", "{lora_id}": "lora_1", "{model}": "tiny"}
    closed = [route for route in (*ROUTES, *A1111_ROUTES) if route.path not in OPEN]
    assert len(closed) > 30
    wrong = ("Bearer sk-nobody-12", basic("sk-nobody-12"), "Basic ?")
    for route in closed:
        path = re.sub(r"\{\w+\}", lambda found: named[found[0]], route.path)
        for headers in ({}, *({"Authorization": key} for key in wrong)):
            answer = await doors.ask(route.method, path, headers=headers)
            challenge = answer.headers["WWW-Authenticate"]
            assert (answer.status, challenge.partition(" realm=")[0]) == (
                401,
                "Bearer, Basic" if route.basic else "Bearer",
            ), path
    assert (await doors.get("/")).status == 200, "the page itself asks for the key"


async def test_a_password_is_no_key_elsewhere(doors: Stage) -> None:
    answer = await doors.get("/v1/models", headers={"Authorization": basic("sk-alice-123")})
    assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")


async def test_a_page_of_another_site_cannot_use_a_password_that_the_browser_remembers(doors: Stage) -> None:
    foreign = {"Sec-Fetch-Site": "cross-site"}
    answer = await post(doors, "interrupt", None, Authorization=basic("sk-alice-123"), **foreign)
    assert answer.code == (403, "cross_site")
    (await post(doors, "interrupt", None, Authorization="Bearer sk-alice-123", **foreign)).expect(200)


async def test_where_every_page_may_call_none_uses_a_remembered_password(
    opening: Opening, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path, {"sk-alice-123": "alice"})
    page = {"Sec-Fetch-Site": "cross-site", "Origin": "https://any.example"}
    async with opening(api_keys_file=keys, cors_origins="*") as stage:
        for key, expected in (("Bearer sk-alice-123", 200), (basic("sk-alice-123"), 403)):
            assert (await post(stage, "interrupt", None, Authorization=key, **page)).status == expected
