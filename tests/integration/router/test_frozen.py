"""A router that stands still loses no attempt, and one that was superseded meanwhile does no harm when it goes on."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pytest
from nats.aio.msg import Msg

from giornata.bus.streams import LEASE_TTL_S
from giornata.fleet import SILENCE_S
from giornata.wire import codec, subjects
from giornata.wire.jobs import Job, JobState
from giornata.wire.messages import SubmitRequest
from giornata.wire.requests import Reuse
from giornata.wire.workers import ServiceName, ServiceState
from tests.fakes.denoiser import FakeDenoiser
from tests.fakes.news import News
from tests.forked_programs import program
from tests.integration.router.bench import Bench, denoiser, make_job
from tests.patience import HUNG_S

pytestmark = pytest.mark.real_nats
WORKERS: Final = 4
JOBS: Final = 24


class RouterProcess:
    """A router that can be stopped as a whole, and what it tells of itself."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.process: Any
        self.active: bool | None = None
        self.told = 0
        self.news = News()

    def hear(self, state: ServiceState) -> None:
        self.active, self.told = state.active, self.told + 1
        self.news.tell()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def until(self, *, active: bool) -> None:
        await self.news.until(lambda: self.active is active, HUNG_S)

    async def until_told(self, times: int) -> None:
        """Until it has told its state so many times more; it does so ten times a second."""
        goal = self.told + times
        await self.news.until(lambda: self.told >= goal, HUNG_S)


@asynccontextmanager
async def router_process(bench: Bench, url: str, blobs_url: str, name: str) -> AsyncIterator[RouterProcess]:
    """A router as a process of its own, which has told its state."""
    router = RouterProcess(name)
    telemetry = subjects.telemetry(ServiceName.ROUTER, name)
    async with bench.bus.listen(telemetry, ServiceState, router.hear):
        flags = ("--instance", name, "--telemetry-hz", "10")
        env = {"GIORNATA_NATS_URL": url, "GIORNATA_BLOBS_URL": blobs_url}
        async with program("giornata_router", *flags, env=env, log=Path(os.devnull)) as router.process:
            await router.until_told(1)
            yield router


async def loaded(stack: AsyncExitStack, bench: Bench) -> list[FakeDenoiser]:
    """Workers that hold their rows at a step."""
    workers = [await denoiser(stack, bench, f"d{i}") for i in range(WORKERS)]
    news = News()
    for worker in workers:
        worker.news = news
        worker.going.clear()
    return workers


async def given(bench: Bench, workers: list[FakeDenoiser], count: int) -> list[Job]:
    """So many jobs, all of them on workers."""
    before = sum(len(worker.requests) for worker in workers)
    jobs = [make_job(reuse=Reuse.OFF) for _ in range(count)]
    await bench.submit(*jobs)
    await workers[0].news.until(lambda: sum(len(w.requests) for w in workers) == before + count)
    return jobs


async def check_undisturbed(bench: Bench, workers: list[FakeDenoiser], jobs: list[Job]) -> None:
    """Let the rows go on: no attempt was lost or cancelled, and none was made twice."""
    assert [job for worker in workers for job in worker.cancelled] == []
    for worker in workers:
        worker.going.set()
    for job in jobs:
        assert (await bench.ended(job)).state is JobState.COMPLETED
    records = [await bench.records.get(job.job_id) for job in jobs]
    assert {(record.attempt, record.causes) for record in records} == {(1, ())}
    assert sorted(r.job.job_id for w in workers for r in w.requests) == sorted(job.job_id for job in jobs)


async def test_a_router_that_stood_still_takes_no_worker_for_dead(
    bench: Bench, nats_account: str, redis_url: str
) -> None:
    """Its lease has ended, too: it leads again, and adopts what runs."""
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(router_process(bench, nats_account, redis_url, "r1"))
        workers = await loaded(stack, bench)
        jobs = await given(bench, workers, JOBS)
        router.freeze()
        await asyncio.sleep(LEASE_TTL_S + 2)
        router.thaw()
        await router.until_told(int(10 * (SILENCE_S + 1)))
        await router.until(active=True)
        await check_undisturbed(bench, workers, jobs)


async def test_a_superseded_router_cancels_nothing_and_answers_nothing(
    bench: Bench, nats_account: str, redis_url: str
) -> None:
    answers = Counter[str]()
    inbox = bench.bus.client.new_inbox()

    async def hear(message: Msg) -> None:
        answers[message.subject] += 1

    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(router_process(bench, nats_account, redis_url, "r1"))
        await first.until(active=True)
        workers = await loaded(stack, bench)
        jobs = await given(bench, workers, JOBS // 2)
        second = await stack.enter_async_context(router_process(bench, nats_account, redis_url, "r2"))
        second.news = first.news
        first.freeze()
        await second.until(active=True)
        jobs += await given(bench, workers, JOBS // 2)
        asked = make_job(reuse=Reuse.OFF)
        await bench.bus.client.subscribe(f"{inbox}.*", cb=hear)
        request = SubmitRequest(job=asked, remaining_ms=60_000)
        bench.done[asked.job_id] = asyncio.get_running_loop().create_future()

        def taken() -> bool:
            return any(request.job == asked for worker in workers for request in worker.requests)

        async with asyncio.timeout(HUNG_S):
            for number in itertools.count():  # one whose lease ends meanwhile takes no job
                reply = f"{inbox}.{number}"
                await bench.bus.client.publish(subjects.SUBMIT, codec.encode(request), reply=reply)
                with suppress(TimeoutError):
                    await workers[0].news.until(taken, 2 * LEASE_TTL_S)
                    break
        first.active = None
        first.thaw()
        await first.until(active=False)
        await first.until_told(int(10 * (SILENCE_S + 1)))
        # The other leads; or this one again, on a machine that stands still for as long as a lease.
        await first.news.until(lambda: {first.active, second.active} == {True, False})
        assert set(answers.values()) == {1}
        await check_undisturbed(bench, workers, [*jobs, asked])
        epochs = {r.job.job_id: r.epoch for worker in workers for r in worker.requests}
        lower, higher = (
            [epoch for job in half if (epoch := epochs[job.job_id])]
            for half in (jobs[: JOBS // 2], [*jobs[JOBS // 2 :], asked])
        )
        assert len(lower) + len(higher) == len(epochs)
        assert len({epoch.created_us for epoch in (*lower, *higher)}) == 1
        assert max(epoch.revision for epoch in lower) < min(epoch.revision for epoch in higher)
