"""Two models of two families in one stack: each has its own workers, and requests tell them by their names."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from giornata.families import Family
from giornata.wire.workers import ServiceName
from giornata_lab.bench.systems.edit_forms import edit_form, pixels
from giornata_tools.checkout import MODELS
from giornata_tools.launcher.models import StackModel, choose
from giornata_tools.launcher.plan import StackPlan
from giornata_tools.launcher.stack import Stack, running
from tests.e2e.jobs import ended, submit, until_step
from tests.patience import HUNG_S


async def built(family: Family, name: str) -> StackModel:
    return StackModel((await choose({}, family, MODELS, print)).source, name)


async def answered(http: aiohttp.ClientSession, **fields: Any) -> tuple[int, Any]:
    async with http.post("/v1/images/edits", data=edit_form(num_inference_steps=2, **fields)) as response:
        return response.status, await response.json()


async def one_may_leave(stack: Stack, http: aiohttp.ClientSession, model: StackModel) -> None:
    """The only denoiser of `model` drains: its job waits for the next one, and the other model goes on."""
    job = await submit(http, edit_form(model=model.name, num_inference_steps=100, reuse="off"))
    await until_step(http, job, 3)
    async with http.get("/v1/fleet") as response:
        instances = (await response.json())["instances"]
    (leaving,) = (
        each["instance"]
        for each in instances
        if each["service"] == ServiceName.DENOISER and each["models"] == [model.name]
    )
    assert await stack.terminate(leaving) == 0
    status, answer = await answered(http, model="fill")
    assert status == 200, answer
    await stack.start(ServiceName.DENOISER, model=model)
    await stack.wait_ready()
    assert (await ended(http, job))["state"] == "completed"


@pytest.mark.long
async def test_a_stack_serves_two_families_side_by_side(tmp_path: Path) -> None:
    models = (await built(Family.FLUX_FILL, "fill"), await built(Family.SD3, "sd3"))
    plan = StackPlan(state=tmp_path / "state", logs=tmp_path / "logs", models=models, ready_s=HUNG_S)
    async with running(plan) as stack:
        await stack.bring_up()
        assert [len(stack.instances(each)) for each in (ServiceName.DENOISER, ServiceName.PREPOST)] == [2, 2]
        async with aiohttp.ClientSession(stack.url) as http:
            async with http.get("/v1/models") as response:
                told = {model["id"]: model for model in (await response.json())["data"]}
            assert {name: model["family"] for name, model in told.items()} == {
                "fill": "flux-fill",
                "sd3": "sd3",
            }
            assert (await answered(http))[1]["error"]["accepted"] == "fill, sd3"
            status, refused = await answered(http, model="fill", negative_prompt="snow")
            assert (status, refused["error"]["accepted"]) == (
                400,
                "leave negative_prompt out; models that take it: sd3",
            )
            pictures = []
            for fields in ({"model": "fill"}, {"model": "sd3", "negative_prompt": "snow"}):
                status, answer = await answered(http, seed=7, **fields)
                assert status == 200, answer
                pictures.append(pixels(base64.b64decode(answer["data"][0]["b64_json"])))
            await one_may_leave(stack, http, models[1])
        assert pictures[0].shape == pictures[1].shape
        assert (pictures[0] != pictures[1]).any(), "each by its own weights"
    assert stack.obituaries == []
