"""A router that serves by ROCK, on the common queue, carries every job to its end."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from giornata.scheduling.policies import PolicyName
from giornata.scheduling.rock import AdapterPlan, rock_match
from giornata.scheduling.scheduler import QueueOrderScheduler
from giornata.wire.jobs import JobState, Priority
from giornata_router.config import RouterConfig
from giornata_router.service import scheduler_of
from tests.integration.router.bench import Bench, denoiser, make_job, running_router


async def test_every_job_ends_once(nats_account: str, bench: Bench) -> None:
    jobs = [
        make_job(n=1 + number % 3, priority=Priority.BATCH if number % 4 == 0 else Priority.INTERACTIVE)
        for number in range(12)
    ]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_router(nats_account, "r1", adapter_plan=AdapterPlan.ROCK))
        for name in ("d1", "d2"):
            await denoiser(stack, bench, name, capacity=2)
        await asyncio.gather(*(bench.submit(job) for job in jobs))
        for job in jobs:
            assert (await bench.ended(job)).state is JobState.COMPLETED
            assert bench.done_count[job.job_id] == 1


@pytest.mark.parametrize("plan", AdapterPlan)
def test_the_plan_rock_alone_matches_as_rock_does(plan: AdapterPlan) -> None:
    rule = scheduler_of(RouterConfig(nats_url="nats://x:1", adapter_plan=plan))
    assert (rule == QueueOrderScheduler(rock_match, loads_ahead=False)) is (plan is AdapterPlan.ROCK)


def test_deadlines_and_rock_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="adapter_plan=rock with policy=deadline_aware"):
        RouterConfig(nats_url="nats://x:1", policy=PolicyName.DEADLINE_AWARE, adapter_plan=AdapterPlan.ROCK)
