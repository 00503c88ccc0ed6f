"""Routers that serve by ROCK, its baselines, and queues of kinds carry every job to its end."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from giornata.scheduling.policies import PolicyName
from giornata.scheduling.queue import FairQueue, QueueOrder, SchedulingParams
from giornata.scheduling.rock import LEAST, JobKindQueue
from giornata.wire.jobs import JobState, Priority
from giornata_router.config import RouterConfig
from giornata_router.job_queue import keep_fitted, line_of
from tests.integration.router.bench import Bench, denoiser, make_job, running_router
from tests.patience import HUNG_S
from tests.unit.scheduling.test_lines import demand


@pytest.mark.parametrize(
    ("policy", "line"),
    [
        (PolicyName.ROCK, None),
        (PolicyName.ROCK, QueueOrder.FAIR),
        (PolicyName.RROD, None),
        (PolicyName.LRUMS, None),
        (PolicyName.FINISH_TIME, QueueOrder.KINDS),
    ],
)
async def test_every_job_ends_once(
    nats_account: str, bench: Bench, policy: PolicyName, line: QueueOrder | None
) -> None:
    jobs = [
        make_job(n=1 + number % 3, priority=Priority.BATCH if number % 4 == 0 else Priority.INTERACTIVE)
        for number in range(12)
    ]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_router(nats_account, "r1", policy=policy, line=line))
        for name in ("d1", "d2"):
            await denoiser(stack, bench, name, capacity=2)
        await asyncio.gather(*(bench.submit(job) for job in jobs))
        for job in jobs:
            assert (await bench.ended(job)).state is JobState.COMPLETED
            assert bench.done_count[job.job_id] == 1


async def test_kinds_are_fitted_beside_the_line_until_the_task_is_cancelled() -> None:
    line = JobKindQueue()
    for number in range(LEAST):
        line.join(
            f"j{number}", demand(1, 20 if number % 2 else 50, 2 * (number % 2)), SchedulingParams(), 0.0
        )
    assert {line.queue_of(entry.key) for entry in line} == {0}
    fitted = asyncio.Event()
    used = line.use

    def use(model: object) -> None:
        used(model)  # type: ignore[arg-type]  # what it was called with
        fitted.set()

    line.use = use  # type: ignore[method-assign]  # to wait for it
    task = asyncio.create_task(keep_fitted(line, pause_s=0.001))
    await asyncio.wait_for(fitted.wait(), HUNG_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    kinds = {(entry.demand.steps, line.queue_of(entry.key)) for entry in line}
    assert len({kind for _, kind in kinds}) == len(kinds) == 2, "each number of steps is a kind of its own"


@pytest.mark.parametrize(
    ("policy", "line", "expected"),
    [
        (PolicyName.FINISH_TIME, None, FairQueue),
        (PolicyName.ROCK, None, JobKindQueue),
        (PolicyName.ROCK, QueueOrder.FAIR, FairQueue),
        (PolicyName.FINISH_TIME, QueueOrder.KINDS, JobKindQueue),
    ],
)
def test_rock_has_queues_of_kinds_unless_another_line_is_asked_for(
    policy: PolicyName, line: QueueOrder | None, expected: type
) -> None:
    assert type(line_of(RouterConfig(nats_url="nats://x:1", policy=policy, line=line))) is expected


@pytest.mark.parametrize(
    ("setting", "asked"),
    [
        ({"policy": "rock"}, "received policy=rock"),
        ({"policy": "rock", "line": "fair"}, "received policy=rock"),
        ({"line": "kinds"}, "received line=kinds"),
    ],
)
def test_without_scikit_learn_rock_is_refused(
    monkeypatch: pytest.MonkeyPatch, setting: dict[str, str], asked: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(
        ValueError, match=rf"{asked}, which needs scikit-learn; accepted once it is installed"
    ):
        RouterConfig(nats_url="nats://x:1", **setting)  # type: ignore[arg-type]  # as the environment gives it


def test_deadlines_and_kinds_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="policy=deadline_aware with line=kinds"):
        RouterConfig(nats_url="nats://x:1", policy=PolicyName.DEADLINE_AWARE, line=QueueOrder.KINDS)
