"""Kill any process at any moment: every accepted job ends in a picture or a clear error, once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
from deploy.launcher.stack import Stack
from giornata.workers import ServiceName

from tests.e2e.pictures import box, edit_form, file, scene

StackOf = Callable[..., AbstractAsyncContextManager[Stack]]

SLOW = {"num_inference_steps": 120}
"""Steps enough at 512x512 that a fault falls into the middle."""


def slow_form(**fields: object) -> aiohttp.FormData:
    return edit_form(file(scene(512, 512)), file(box(512, 512)), **{**SLOW, **fields})


async def submit(http: aiohttp.ClientSession, form: aiohttp.FormData) -> str:
    async with http.post("/v1/jobs", data=form) as answer:
        assert answer.status == 202, await answer.text()
        return answer.headers["Location"]


async def until_step(http: aiohttp.ClientSession, location: str, step: int) -> dict[str, Any]:
    """The first event at or after `step`."""
    async with http.get(f"{location}/events") as answer:
        async for line in answer.content:
            if line.startswith(b"data: "):
                data: dict[str, Any] = json.loads(line[6:])
                if (data.get("step") or 0) >= step:
                    return data
    raise AssertionError("the job ended before that step")


async def ended(http: aiohttp.ClientSession, location: str, limit_s: float = 60) -> dict[str, Any]:
    """The job's status after its last event."""
    async with asyncio.timeout(limit_s):
        async with http.get(f"{location}/events") as answer:
            async for _ in answer.content:
                pass
        async with http.get(location) as answer:
            status: dict[str, Any] = await answer.json()
            return status


async def worker_of(stack: Stack, http: aiohttp.ClientSession) -> str:
    """The denoiser that has rows."""
    async with http.get("/v1/fleet") as answer:
        instances = (await answer.json())["instances"]
    busy = [i["instance"] for i in instances if i["service"] == "denoiser" and i["running_rows"]]
    assert len(busy) == 1
    assert busy[0] in stack.instances(ServiceName.DENOISER)
    return str(busy[0])


async def test_a_job_survives_its_denoiser_and_then_its_router(stack_of: StackOf) -> None:
    async with (
        stack_of(denoiser=2, router=2) as stack,
        aiohttp.ClientSession(stack.url) as http,
    ):
        location = await submit(http, slow_form())
        await until_step(http, location, 3)
        await asyncio.sleep(0.4)  # one telemetry period, so that the fleet names the worker
        await stack.kill(await worker_of(stack, http))
        job = await ended(http, location)
        assert (job["state"], job["attempt"]) == ("completed", 2)

        locations = [await submit(http, slow_form(seed=i, num_inference_steps=40)) for i in range(3)]
        await until_step(http, locations[0], 2)
        active = [s.instance for s in stack.watch.fleet.ready(ServiceName.ROUTER)]
        assert len(active) == 1
        await stack.kill(active[0])
        jobs = [await ended(http, location) for location in locations]
        assert [job["state"] for job in jobs] == ["completed"] * 3
        assert [job["attempt"] for job in jobs] == [1] * 3, "the denoiser lived: nothing was computed twice"


async def test_a_draining_denoiser_hands_on_what_it_has_computed(stack_of: StackOf) -> None:
    async with stack_of(denoiser=2) as stack, aiohttp.ClientSession(stack.url) as http:
        location = await submit(http, slow_form())
        await until_step(http, location, 10)
        await asyncio.sleep(0.4)  # one telemetry period, so that the fleet names the worker
        assert await stack.terminate(await worker_of(stack, http)) == 0
        job = await ended(http, location)
        assert (job["state"], job["attempt"]) == ("completed", 2)
        steps = []
        async with http.get(f"{location}/events") as answer:
            async for line in answer.content:
                if line.startswith(b"data: ") and json.loads(line[6:]).get("step"):
                    steps.append(json.loads(line[6:])["step"])
        assert steps == sorted(set(steps)), "no step was computed twice"
        assert steps[-1] == SLOW["num_inference_steps"]


async def test_a_job_survives_prepost_and_the_gateway_that_accepted_it(stack_of: StackOf) -> None:
    async with stack_of(gateway=2) as stack, aiohttp.ClientSession() as http:
        first, second = stack.urls
        location = await submit(http, slow_form()) if False else await submit_to(http, first, slow_form())
        await until_step(http, f"{second}{location}", 3)
        [prepost] = stack.instances(ServiceName.PREPOST)
        await stack.kill(prepost)
        await stack.start(ServiceName.PREPOST)
        await stack.kill(stack.gateway_at(first))
        job = await ended(http, f"{second}{location}")
        assert job["state"] == "completed"
        async with http.get(f"{second}{location}/image") as answer:
            assert answer.status == 200


async def submit_to(http: aiohttp.ClientSession, url: str, form: aiohttp.FormData) -> str:
    async with http.post(f"{url}/v1/jobs", data=form) as answer:
        assert answer.status == 202, await answer.text()
        return answer.headers["Location"]


async def test_a_full_gateway_and_a_full_queue_refuse_with_retry_after(stack_of: StackOf) -> None:
    env = {"GIORNATA_MAX_CONCURRENT_ROWS": "1", "GIORNATA_QUEUE_LIMIT": "2"}
    async with stack_of(env=env) as stack, aiohttp.ClientSession(stack.url) as http:
        waiting = asyncio.create_task(http.post("/v1/images/edits", data=slow_form()))
        async with asyncio.timeout(20):
            while True:
                async with http.post("/v1/images/edits", data=edit_form()) as answer:
                    body = await answer.json()
                if answer.status == 429:
                    break
        assert body["error"]["code"] == "too_many_requests"
        assert int(answer.headers["Retry-After"]) >= 1
        first = await waiting
        assert first.status == 200
        first.close()
        accepted, refused = [], None
        for seed in range(4):
            async with http.post("/v1/jobs", data=slow_form(seed=seed)) as answer:
                if answer.status == 202:
                    accepted.append(answer.headers["Location"])
                else:
                    refused = (answer.status, (await answer.json())["error"]["code"], answer.headers.get("Retry-After"))
        assert refused is not None
        assert refused[0] in {429, 503}
        assert refused[1] in {"queue_full", "too_many_requests"}
        assert refused[2]
        assert [(await ended(http, location))["state"] for location in accepted] == ["completed"] * len(accepted)


async def test_a_drained_stack_leaves_accepted_jobs_to_the_next(stack_of: StackOf, tmp_path: Any) -> None:
    async with stack_of(state=tmp_path / "state") as stack, aiohttp.ClientSession(stack.url) as http:
        locations = [await submit(http, slow_form(seed=i)) for i in range(2)]
        await until_step(http, locations[0], 2)
    async with stack_of(state=tmp_path / "state") as stack, aiohttp.ClientSession(stack.url) as http:
        async with asyncio.timeout(90):
            for location in locations:
                while True:
                    async with http.get(location) as answer:
                        state = (await answer.json())["state"]
                    if state in {"completed", "failed", "cancelled"}:
                        break
                    await asyncio.sleep(0.2)
                assert state == "completed"
