"""Every process that works for a job dies, and a whole stack ends before its jobs: each ends in its picture, once.

Each fault by itself is tested where its service is; here are those that need all services at once.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from giornata.fleet import Fleet
from giornata.wire.workers import ServiceName
from giornata_lab.bench.systems.edit_forms import box, edit_form, file, scene
from giornata_tools.launcher.models import StackModel
from giornata_tools.launcher.plan import NATS, ONE_EACH, VALKEY, StackPlan
from giornata_tools.launcher.stack import running
from tests import forked_programs
from tests.e2e.collector import CollectedSpan, Collector
from tests.e2e.jobs import completions, ended, painted, submit, until_step
from tests.e2e.live import LiveStack, paced, slowly

STEPS = 20
STEP_S = 0.05
LONG_S = 1.5
"""That a step waits while faults come, so that all of them fall into the middle of the job."""


@pytest.fixture
async def stack(pairs: LiveStack) -> AsyncIterator[LiveStack]:
    """What a test has killed has a successor before the next one."""
    yield pairs
    await pairs.make_whole()


def slow_form(picture: int, **fields: object) -> aiohttp.FormData:
    """An edit of a picture that other tests do not have, so that no template of theirs serves it."""
    return edit_form(file(scene(seed=picture)), file(box()), num_inference_steps=STEPS, **fields)


async def busy_denoiser(stack: LiveStack, job: str) -> str:
    """The denoiser that computes the job."""
    found: list[str] = []

    def busy(fleet: Fleet) -> bool:
        workers = ((state.instance, state.worker) for state in fleet.ready(ServiceName.DENOISER))
        found[:] = [
            name
            for name, worker in workers
            if worker and any(job.endswith(row.job_id) for row in worker.running)
        ]
        return bool(found)

    await stack.until(busy)
    return found[0]


async def active_router(stack: LiveStack) -> str:
    """The router that has the lease."""
    found: list[str] = []

    def one(fleet: Fleet) -> bool:
        found[:] = [s.instance for s in fleet.ready(ServiceName.ROUTER)]
        return len(found) == 1

    await stack.until(one)
    return found[0]


def attempts(spans: Sequence[CollectedSpan]) -> list[CollectedSpan]:
    return [one for one in spans if one.name == "attempt"]


async def test_a_job_outlives_every_process_that_works_for_it(
    stack: LiveStack, collector: Collector, pace: Path
) -> None:
    trace = secrets.token_hex(16)
    traced = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    async with aiohttp.ClientSession(stack.url, headers=traced) as http:
        with slowly(pace, LONG_S):
            job = await submit(http, slow_form(1, reuse="off"))
            await until_step(http, job, 1)
            lost = await busy_denoiser(stack, job)
            await stack.kill(lost)
            told = await asyncio.to_thread(collector.until, trace, lambda spans: bool(attempts(spans)))
            await until_step(http, job, 1)
            await stack.kill(await active_router(stack))
            for server in (NATS, VALKEY):
                await stack.crash(server)
            for prepost in stack.instances(ServiceName.PREPOST):
                await stack.kill(prepost)
            [_, gateway] = stack.instances(ServiceName.GATEWAY)
            await stack.kill(stack.instances(ServiceName.GATEWAY)[0])
            assert stack.instances(ServiceName.GATEWAY) == [gateway]
            await stack.start(ServiceName.PREPOST)
    async with aiohttp.ClientSession(stack.url) as http:
        status = await ended(http, job)
        assert (status["state"], status["attempt"]) == ("completed", 2), (
            "one attempt was lost, with its denoiser"
        )
        assert await completions(http, job) == 1
        disturbed = (await painted(http, job)).astype(int)
        alone = await submit(http, slow_form(1, reuse="off"))
        assert (await ended(http, alone))["state"] == "completed"
        assert np.abs(disturbed - await painted(http, alone)).max() <= 1
    [attempt] = attempts(told)
    assert (attempt.failed, attempt.attributes["error.type"]) == (True, "attempt_lost")
    assert attempt.attributes["giornata.worker"] == lost


async def test_a_stopped_stack_leaves_accepted_jobs_to_the_next(
    tiny_model: Path, tmp_path: Path, pace: Path
) -> None:
    with paced(pace, STEP_S) as env_of, ExitStack() as long:
        plan = StackPlan(
            state=tmp_path / "state",
            logs=tmp_path / "logs",
            models=(StackModel(str(tiny_model), "tiny"),),
            replicas={**ONE_EACH, ServiceName.LORA_STORE: 0},
            drain_s=1,  # too short to finish: what was computed is kept
            env_of=env_of,
        )
        async with running(plan, spawn=forked_programs.spawn) as first:
            await first.bring_up()
            long.enter_context(slowly(pace, LONG_S))
            async with aiohttp.ClientSession(first.url) as http:
                jobs = [await submit(http, slow_form(2, seed=seed)) for seed in range(2)]
                await until_step(http, jobs[0], 1)
        long.close()
        assert first.obituaries == []
        async with running(plan, spawn=forked_programs.spawn) as second:
            await second.bring_up()
            async with aiohttp.ClientSession(second.url) as http:
                statuses = [await ended(http, job) for job in jobs]
        assert [status["state"] for status in statuses] == ["completed"] * 2
        assert statuses[0]["attempt"] == 2, "it was begun by the first stack and ended by the second"
