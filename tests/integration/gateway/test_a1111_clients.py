"""What clients of A1111's API send by themselves: SillyTavern, Open WebUI, Forge's page, and `webuiapi`."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from giornata.wire.adapters import ControlCard, ControlKind
from giornata.wire.models import Sampler, Task
from giornata.wire.requests import EditParameters
from tests.fakes.fleet import SDXL
from tests.integration.fake_router import CARD
from tests.integration.gateway.test_a1111 import EDIT, get, post
from tests.integration.gateway_fakes import Stage
from tests.patience import HUNG_S

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


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"restore_faces": True}, "restore_faces"),
        ({"override_settings": {"CLIP_stop_at_last_layers": 1, "sd_vae": "x.pt"}}, "override_settings.sd_vae"),
        ({"alwayson_scripts": {"ADetailer": {"args": [True, True, {"ad_model": "face_yolov8n.pt"}]}}},
         "alwayson_scripts.ADetailer"),
        ({"init_images": ["eA=="]}, "init_images"),
    ],
)  # fmt: skip
async def test_what_sillytaverns_user_chose_is_refused_where_it_would_change_the_picture(
    sdxl: Stage, change: dict[str, Any], field: str
) -> None:
    answer = await post(sdxl, "txt2img", SILLY_TAVERN | change)
    assert answer.refusal == (400, "invalid_field", field)
    assert sdxl.router.jobs == {}
    assert "auth" in answer.ignored or field != "alwayson_scripts.ADetailer"


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


async def test_a_listed_controlnet_is_a_units_model(stage: Stage) -> None:
    card = ControlCard(name="outline", digest="0123abcd" * 8, kind=ControlKind.FLUX, text_channels=32)
    stage.router.controlnets = {"tiny": (card,)}
    await stage.router.announce()
    [model] = (await get(stage, "/controlnet/model_list"))["model_list"]
    unit = UNIT | {
        "enabled": True,
        "model": model,
        "image": base64.b64encode(b"lines").decode(),
        "low_vram": True,
    }
    scripts = {"alwayson_scripts": {"ControlNet": {"args": [unit]}}}
    answer = await post(stage, "img2img", EDIT | scripts)
    assert (answer.status, answer.ignored) == (200, ["alwayson_scripts.controlnet.args.0.low_vram"]), (
        answer.text
    )
    assert [use.model for use in (await stage.record()).job.controls] == ["outline"]


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
