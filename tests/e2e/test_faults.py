"""Kill any process at any moment: every accepted job ends in a picture or a clear error, once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path

import aiohttp
import numpy as np
import pytest

import giornata.client
from giornata.fleet import Fleet
from giornata.wire.workers import ServiceName
from giornata_tools.launcher.model import StackModel
from giornata_tools.launcher.plan import StackPlan
from giornata_tools.launcher.servers import NATS, VALKEY
from giornata_tools.launcher.stack import running
from tests.e2e.jobs import completions, ended, painted, steps_told, submit, until_step
from tests.e2e.live import LiveStack, live_stack, paced, slowly
from tests.e2e.pictures import box, edit_form, file, scene

pytestmark = pytest.mark.slow

STEP_S = 0.1
STEPS = 60
"""Enough that a fault falls into the middle, and that a router's lease runs out before they are over."""
QUEUE_LIMIT = 4

PAIRS = dict.fromkeys(ServiceName, 2) | {ServiceName.CONTROLNET: 0, ServiceName.LORA_STORE: 1}
SETTINGS = {
    "GIORNATA_CAPACITY_ROWS": "1",  # two pictures need two denoisers, however slow one of them looks
    "GIORNATA_DRAIN_S": "0",  # what a denoiser has begun goes on elsewhere
    "GIORNATA_NOTICE_S": "0",
    "GIORNATA_MAX_CONCURRENT_ROWS": "1",
    "GIORNATA_QUEUE_LIMIT_BATCH": str(QUEUE_LIMIT),
    "GIORNATA_TENANT_SHARE": "1",
}


@pytest.fixture(scope="module")
def pairs(tiny_model: Path, pace: Path) -> Iterator[LiveStack]:
    """Two of each service, three NATS servers, and denoisers whose steps wait."""
    with paced(pace, STEP_S) as env_of, live_stack(tiny_model, PAIRS, SETTINGS, 3, env_of) as live:
        yield live


@pytest.fixture
async def stack(pairs: LiveStack) -> AsyncIterator[LiveStack]:
    """The stack that this file's tests share; what a test has killed has a successor before the next one."""
    yield pairs
    await pairs.make_whole()


def slow_form(picture: int, **fields: object) -> aiohttp.FormData:
    """An edit of a picture that other tests do not have, so that no template of theirs serves it."""
    return edit_form(file(scene(seed=picture)), file(box()), **{"num_inference_steps": STEPS, **fields})


async def busy_denoiser(stack: LiveStack, job: str) -> str:
    """The denoiser that computes the job."""
    [found] = await busy_denoisers(stack, job, 1)
    return found


async def busy_denoisers(stack: LiveStack, job: str, at_least: int) -> list[str]:
    """The denoisers that compute a job, once so many do. Telemetry lags: it may still tell of an earlier job's rows."""
    found: list[str] = []

    def busy(fleet: Fleet) -> bool:
        every = [
            (state.instance, state.worker) for state in fleet.ready(ServiceName.DENOISER) if state.worker
        ]
        found[:] = [name for name, worker in every if any(job.endswith(row.job_id) for row in worker.running)]
        return len(found) >= at_least

    await stack.until(busy)
    return found


async def active_router(stack: LiveStack) -> str:
    """The router that has the lease."""
    found: list[str] = []

    def one(fleet: Fleet) -> bool:
        found[:] = [s.instance for s in fleet.ready(ServiceName.ROUTER)]
        return len(found) == 1

    await stack.until(one)
    return found[0]


async def test_a_job_survives_its_denoiser_and_then_its_router(stack: LiveStack) -> None:
    async with aiohttp.ClientSession(stack.url) as http:
        job = await submit(http, slow_form(1, reuse="off"))
        await until_step(http, job, 3)
        await stack.kill(await busy_denoiser(stack, job))
        status = await ended(http, job)
        assert (status["state"], status["attempt"]) == ("completed", 2)
        assert await completions(http, job) == 1

        jobs = [await submit(http, slow_form(1, reuse="off", seed=seed)) for seed in (7, 8, 9)]
        await until_step(http, jobs[0], 2)
        await stack.kill(await active_router(stack))
        statuses = [await ended(http, job) for job in jobs]
        assert [status["state"] for status in statuses] == ["completed"] * 3
        assert [status["attempt"] for status in statuses] == [1] * 3, (
            "the denoiser lived: nothing was computed twice"
        )
        assert [await completions(http, job) for job in jobs] == [1] * 3
        disturbed, undisturbed = await painted(http, job), await painted(http, jobs[0])
        assert np.abs(disturbed.astype(int) - undisturbed).max() <= 1, "the second attempt paints the same"


async def test_pictures_of_one_edit_are_painted_side_by_side_and_one_survives_the_others_denoiser(
    stack: LiveStack,
) -> None:
    async with aiohttp.ClientSession(stack.url) as http:
        job = await submit(http, slow_form(2, n=2, seed=20, reuse="off"))
        first, _ = await busy_denoisers(stack, job, 2)
        await stack.kill(first)
        status = await ended(http, job)
        assert (status["state"], status["attempt"]) == ("completed", 3), (
            "one was computed once, the other twice"
        )
        assert await completions(http, job) == 2, "one for each picture"
        for index in range(2):
            alone = await submit(http, slow_form(2, seed=20 + index, reuse="off"))
            assert (await ended(http, alone))["state"] == "completed"
            difference = (await painted(http, job, index)).astype(int) - await painted(http, alone)
            assert np.abs(difference).max() <= 1


async def test_a_draining_denoiser_hands_on_what_it_has_computed(stack: LiveStack) -> None:
    async with aiohttp.ClientSession(stack.url) as http:
        job = await submit(http, slow_form(3))
        reached = asyncio.Event()
        following = asyncio.create_task(steps_told(http, job, 10, reached))
        await reached.wait()
        assert await stack.terminate(await busy_denoiser(stack, job)) == 0
        status = await ended(http, job)
        assert (status["state"], status["attempt"]) == ("completed", 2)
        steps = await following
        assert steps == list(range(steps[0], STEPS + 1)), "each step was computed once"


async def test_a_job_survives_prepost_and_the_gateway_that_accepted_it(stack: LiveStack) -> None:
    first = stack.url
    async with aiohttp.ClientSession(first) as http:
        job = await submit(http, slow_form(4))
        await until_step(http, job, 3)
    for prepost in stack.instances(ServiceName.PREPOST):
        await stack.kill(prepost)
    await stack.kill(stack.instances(ServiceName.GATEWAY)[0])
    assert stack.url != first
    await stack.start(ServiceName.PREPOST)
    async with aiohttp.ClientSession(stack.url) as http:
        assert (await ended(http, job))["state"] == "completed"
        assert (await painted(http, job)).shape == (96, 128, 3)


async def test_jobs_survive_a_blob_store_that_is_killed_again_and_again(stack: LiveStack) -> None:
    """Each time it is away for longer: at last for longer than a command is tried."""
    async with aiohttp.ClientSession(stack.url) as http:
        undisturbed = await submit(http, slow_form(5, num_inference_steps=40, reuse="off"))
        assert (await ended(http, undisturbed))["state"] == "completed"
        expected = await painted(http, undisturbed)
        first = await submit(http, slow_form(5, num_inference_steps=40, reuse="off"))
        await until_step(http, first, 3)
        later = [await submit(http, slow_form(5, num_inference_steps=10, reuse="off")) for _ in range(3)]
        following = [asyncio.create_task(steps_told(http, job)) for job in (first, *later)]
        for _ in range(4):
            await stack.crash(VALKEY)
        for job, told_of_it in zip((first, *later), following, strict=True):
            assert (await ended(http, job))["state"] == "completed"
            assert await completions(http, job) == 1
            steps = await told_of_it  # none of a job that was over before it was followed
            assert all(after == before + 1 for before, after in pairwise(steps)), (
                "each step was computed once"
            )
        disturbed = await painted(http, first)
        assert np.abs(disturbed.astype(int) - expected).max() <= 1
        assert np.array_equal(await painted(http, undisturbed), expected), "what was there is there"


async def test_edits_go_on_while_servers_of_a_nats_cluster_die(stack: LiveStack) -> None:
    async with aiohttp.ClientSession(stack.url) as http:
        for server in range(1, 4):
            job = await submit(http, slow_form(6, num_inference_steps=40))
            await until_step(http, job, 3)
            await stack.crash(f"{NATS}-{server}")
            assert (await ended(http, job))["state"] == "completed"
            assert await completions(http, job) == 1
        async with giornata.client.connect(stack.nats_url) as client:
            edit = await client.edit(image=file(scene()), mask=file(box()), prompt="a red star")
            assert len((await edit).pictures) == 1


async def test_a_full_gateway_refuses_with_retry_after(stack: LiveStack) -> None:
    async with aiohttp.ClientSession(stack.url) as http:
        form = slow_form(7, stream=True)
        async with http.post("/v1/images/edits", data=form) as first:  # it is accepted when its stream begins
            assert first.status == 200
            async with http.post("/v1/images/edits", data=edit_form()) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (429, "too_many_requests")
                assert int(answer.headers["Retry-After"]) >= 1
            assert b"image_edit.completed" in await first.read()


async def test_a_full_queue_refuses_and_keeps_what_it_accepted(stack: LiveStack, pace: Path) -> None:
    async with aiohttp.ClientSession(stack.url) as http:
        with slowly(pace, 1.0):  # none ends before the queue is full
            jobs = [
                await submit(http, slow_form(8, seed=seed, num_inference_steps=40))
                for seed in range(QUEUE_LIMIT)
            ]
            async with http.post("/v1/jobs", data=slow_form(8)) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (429, "batch_queue_full")
                assert int(answer.headers["Retry-After"]) >= 1
        assert [(await ended(http, job))["state"] for job in jobs] == ["completed"] * QUEUE_LIMIT
        assert (await ended(http, await submit(http, edit_form())))["state"] == "completed"


async def test_a_stopped_stack_leaves_accepted_jobs_to_the_next(
    tiny_model: Path, tmp_path: Path, pace: Path
) -> None:
    with paced(pace, STEP_S) as env_of:
        plan = StackPlan(
            state=tmp_path / "state",
            logs=tmp_path / "logs",
            models=(StackModel(str(tiny_model), "tiny"),),
            drain_s=1,  # too short to finish: what was computed is kept
            env_of=env_of,
        )
        await begun_and_ended(plan)


async def begun_and_ended(plan: StackPlan) -> None:
    async with running(plan) as stack:
        await stack.bring_up()
        async with aiohttp.ClientSession(stack.url) as http:
            jobs = [await submit(http, slow_form(9, seed=seed)) for seed in range(2)]
            await until_step(http, jobs[0], 2)
    assert stack.obituaries == []
    async with running(plan) as stack:
        await stack.bring_up()
        async with aiohttp.ClientSession(stack.url) as http:
            statuses = [await ended(http, job) for job in jobs]
            assert [status["state"] for status in statuses] == ["completed"] * 2
            assert statuses[0]["attempt"] == 2, "it was begun by the first stack and ended by the second"
