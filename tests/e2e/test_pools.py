"""Denoisers of two devices each: what kills or stops a rank or a leader loses no job, and leaves nothing behind."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from giornata.fleet import Fleet
from giornata.wire.workers import RankPhase, ServiceName
from tests.e2e.jobs import completions, ended, painted, submit, until_step
from tests.e2e.live import LiveStack, live_stack
from tests.e2e.pictures import box, edit_form, file, scene
from tests.integration.denoiser.pool.bench import profiled
from tests.patience import HUNG_S

pytestmark = pytest.mark.slow

STEPS = 100
"""Enough that a fault falls into the middle."""
DEVICES = 2


@pytest.fixture(scope="module")
def pools(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    """Two denoisers of two ranks each, whose profile says that both together are quicker."""
    profile = tmp_path_factory.mktemp("pools") / "profile.json"
    profiled(tiny_model, profile, degrees=(2,))
    own = {"GIORNATA_DEVICES": ",".join(["cpu"] * DEVICES), "GIORNATA_PROFILE": str(profile)}
    replicas = {ServiceName.DENOISER: 2}
    with live_stack(tiny_model, replicas, env_of={ServiceName.DENOISER: own}) as live:
        yield live


@pytest.fixture
async def stack(pools: LiveStack) -> AsyncIterator[LiveStack]:
    yield pools
    await pools.make_whole()
    await pools.until(whole)


def whole(fleet: Fleet) -> bool:
    """Whether every denoiser has all of its ranks."""
    workers = [state.worker for state in fleet.ready(ServiceName.DENOISER)]
    return len(workers) == 2 and all(
        worker is not None and [rank.phase for rank in worker.ranks] == [RankPhase.READY] * DEVICES
        for worker in workers
    )


async def jobs_under_way(http: aiohttp.ClientSession, **fields: object) -> list[str]:
    """Several jobs of pictures that no other test has, some of them in the middle."""
    jobs = [
        await submit(
            http,
            edit_form(
                file(scene(seed=40 + index)),
                file(box()),
                num_inference_steps=STEPS,
                reuse="off",
                seed=index,
                **fields,
            ),
        )
        for index in range(4)
    ]
    await until_step(http, jobs[0], 5)
    return jobs


async def all_end_once(http: aiohttp.ClientSession, jobs: Sequence[str]) -> None:
    statuses = [await ended(http, job) for job in jobs]
    assert [status["state"] for status in statuses] == ["completed"] * len(jobs), statuses
    assert [await completions(http, job) for job in jobs] == [1] * len(jobs)


async def test_jobs_survive_killed_and_stopped_ranks_and_paint_the_same(stack: LiveStack) -> None:
    async with aiohttp.ClientSession(stack.url) as http:
        undisturbed = await jobs_under_way(http)
        await all_end_once(http, undisturbed)
        disturbed = await jobs_under_way(http)
        first, second = stack.instances(ServiceName.DENOISER)
        os.kill(stack.ranks(first)[0], signal.SIGKILL)
        os.kill(stack.ranks(second)[1], signal.SIGSTOP)
        await all_end_once(http, disturbed)
        await stack.until(whole)
        for one, other in zip(disturbed, undisturbed, strict=True):
            difference = np.abs((await painted(http, one)).astype(int) - await painted(http, other))
            assert difference.max() <= 1


@pytest.mark.parametrize("stopped", [False, True], ids=["killed", "stopped"])
async def test_jobs_survive_their_leader_and_nothing_of_it_is_left(stack: LiveStack, stopped: bool) -> None:
    async with aiohttp.ClientSession(stack.url) as http:
        jobs = await jobs_under_way(http, slo_ms=1)  # late already: they are computed all the same
        leader = stack.instances(ServiceName.DENOISER)[0]
        descriptors = [os.pidfd_open(pid) for pid in stack.ranks(leader)]
        assert len(descriptors) == DEVICES
        if stopped:
            os.kill(stack.pid(leader), signal.SIGSTOP)
            await all_end_once(http, jobs)
        await stack.kill(leader)
        for descriptor in descriptors:
            ready, _, _ = select.select([descriptor], [], [], HUNG_S)
            assert ready, "a rank outlives its leader"
            os.close(descriptor)
        await all_end_once(http, jobs)
