"""Who comes next, in whole edits: one worker with one place, which is held until everybody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from giornata.scheduling.policies import PolicyName
from giornata.scheduling.queue import AGEING_S
from giornata.wire import subjects
from giornata.wire.jobs import Job, JobState, Priority
from giornata.wire.messages import DoneEvent
from giornata.wire.workers import ServiceName, ServiceState
from tests.fakes.denoiser import FakeDenoiser
from tests.fakes.news import News
from tests.integration.router.bench import COSTS, Bench, make_job, running_router
from tests.present import present


class Counter:
    """A router, and one worker with one place that somebody has already."""

    def __init__(self, bench: Bench, worker: FakeDenoiser) -> None:
        self._bench, self._worker = bench, worker
        self._joined, self._waiting, self._news = 0, 0, News()

    def hear(self, state: ServiceState) -> None:
        """What the router tells of itself."""
        self._waiting = state.queue.jobs if state.queue else 0
        self._news.tell()

    async def join(self, *jobs: Job) -> None:
        """Each comes to stand in the line before the next one is submitted."""
        for job in jobs:
            await self._bench.submit(job)
            self._joined += 1
            await self._news.until(lambda: self._waiting == self._joined)

    def within_ms(self, job: Job) -> float | None:
        """How much time the worker was told that the rows of a job have."""
        (told,) = (r.denoise_within_ms for r in self._worker.requests if r.job.job_id == job.job_id)
        return told

    async def served(self, *jobs: Job) -> tuple[list[Job], list[DoneEvent]]:
        """Let the worker go on: `jobs` in the order in which they got their place, and how they ended."""
        self._worker.going.set()
        ended = [await self._bench.ended(job) for job in jobs]
        by_id = {job.job_id: job for job in jobs}
        return [by_id[r.job.job_id] for r in self._worker.requests if r.job.job_id in by_id], ended


@asynccontextmanager
async def counter(
    bench: Bench,
    url: str,
    *,
    policy: PolicyName = PolicyName.FINISH_TIME,
    ageing_s: float = AGEING_S,
) -> AsyncIterator[Counter]:
    worker = FakeDenoiser(bench.bus, bench.records, "d1", capacity=1, costs=COSTS)
    worker.going.clear()
    made = Counter(bench, worker)
    async with (
        bench.bus.listen(subjects.telemetry(ServiceName.ROUTER, "r"), ServiceState, made.hear),
        running_router(url, "r", policy=policy, ageing_s=ageing_s),
        worker.run(),
    ):
        first = await bench.submitted(tenant="first", budget_ms=600_000)
        await worker.news.until(lambda: bool(worker.requests))
        yield made
        await bench.ended(first)


def job(
    tenant: str = "default",
    *,
    weight: float = 1.0,
    slo_ms: int | None = None,
    priority: Priority = Priority.INTERACTIVE,
) -> Job:
    return make_job(tenant=tenant, weight=weight, slo_ms=slo_ms, priority=priority, budget_ms=600_000)


@pytest.mark.parametrize("ageing_s", [0.5, 600.0])
async def test_a_batch_edit_comes_last_until_it_has_waited_for_long(
    bench: Bench, nats_account: str, ageing_s: float
) -> None:
    batch, others = job(priority=Priority.BATCH), [job() for _ in range(4)]
    async with counter(bench, nats_account, ageing_s=ageing_s) as line:
        await line.join(batch, *others)
        await asyncio.sleep(min(ageing_s, 0.6))  # what is tested is that time passes
        order, ended = await line.served(batch, *others)
    assert order == ([batch, *others] if ageing_s < 1 else [*others, batch])
    assert {event.state for event in ended} == {JobState.COMPLETED}


async def test_the_earliest_deadline_comes_first_and_one_that_cannot_be_met_takes_its_turn(
    bench: Bench, nats_account: str
) -> None:
    missed, whenever = job(slo_ms=1), job()
    later, sooner = job(slo_ms=500_000), job(slo_ms=300_000)
    async with counter(bench, nats_account, policy=PolicyName.DEADLINE_AWARE) as line:
        await line.join(missed, whenever, later, sooner)
        order, ended = await line.served(missed, whenever, later, sooner)
        told = [line.within_ms(one) for one in (missed, whenever, later, sooner)]
    assert order == [sooner, later, missed, whenever]
    assert told[1] is None
    assert present(told[0]) < 0, "its time has passed"
    for one, limit_ms in zip(told[2:], (500_000, 300_000), strict=True):
        assert 0 < present(one) < limit_ms, "what was spent before is off"
    assert [event.slo_met for event in ended] == [False, None, True, True]
    records = [await bench.records.get(one.job_id) for one in (missed, whenever, later, sooner)]
    assert [record.slo_met for record in records] == [False, None, True, True]
    assert {record.state for record in records} == {JobState.COMPLETED}


async def test_without_the_policy_deadlines_decide_nothing_and_are_told(
    bench: Bench, nats_account: str
) -> None:
    whenever, urgent = job(), job(slo_ms=300_000)
    async with counter(bench, nats_account) as line:
        await line.join(whenever, urgent)
        order, ended = await line.served(whenever, urgent)
    assert order == [whenever, urgent]
    assert [event.slo_met for event in ended] == [None, True]
