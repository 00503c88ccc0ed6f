"""Preposts that are frozen, gone, busy or old: the budget alone ends a job, and work goes where it can be begun."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

from giornata.fleet import SILENCE_S
from giornata.wire.errors import InternalError
from giornata.wire.jobs import Job, JobState
from tests.fakes.fleet import CARD, FakePrepost
from tests.integration.router.bench import Bench, denoiser, make_job, running_router


async def all_completed(bench: Bench, jobs: list[Job]) -> None:
    events = [await bench.ended(job) for job in jobs]
    assert [(event.state, event.error) for event in events] == [(JobState.COMPLETED, None)] * len(jobs)


async def another(
    stack: AsyncExitStack, bench: Bench, name: str, prepost: FakePrepost | None = None
) -> FakePrepost:
    made = prepost or FakePrepost(bench.bus, name)
    await stack.enter_async_context(made.run())
    return made


async def test_jobs_outlast_the_silence_of_the_only_prepost(bench: Bench, stack: AsyncExitStack) -> None:
    await denoiser(stack, bench, "d1")

    def freeze(asked: str) -> None:
        if asked == "encode":
            bench.prepost.fail = lambda _: None
            bench.prepost.going.clear()

    bench.prepost.fail = freeze
    jobs = [make_job() for _ in range(5)]
    await bench.submit(*jobs)
    await bench.prepost.news.until(lambda: not bench.prepost.going.is_set())
    await asyncio.sleep(12 * SILENCE_S)  # longer than any number of tries would last
    bench.prepost.going.set()
    await all_completed(bench, jobs)


async def test_what_a_frozen_prepost_has_is_done_by_the_other(bench: Bench, stack: AsyncExitStack) -> None:
    await denoiser(stack, bench, "d1")
    bench.prepost.hold = asyncio.Event()
    jobs = [make_job() for _ in range(6)]
    await bench.submit(*jobs)
    await bench.prepost.news.until(lambda: len(set(bench.prepost.asked)) == len(jobs))
    bench.prepost.going.clear()
    other = await another(stack, bench, "p2")
    await all_completed(bench, jobs)
    assert set(other.asked) == {
        f"{verb} {job.job_id}{' 0' if verb == 'finish' else ''}"
        for job in jobs
        for verb in ("inspect", "encode", "finish")
    }


async def test_a_prepost_that_was_frozen_is_asked_again(bench: Bench, stack: AsyncExitStack) -> None:
    await denoiser(stack, bench, "d1")
    first = await bench.submitted()
    await all_completed(bench, [first])
    bench.prepost.going.clear()
    job = await bench.submitted()
    other = await another(stack, bench, "p2")
    await all_completed(bench, [job])
    other.going.clear()
    bench.prepost.going.set()
    last = await bench.submitted()
    await all_completed(bench, [last])


async def test_an_instance_has_no_more_than_it_can_begin_and_a_cancelled_job_gives_its_room_back(
    nats_account: str, bench: Bench, stack: AsyncExitStack
) -> None:
    await denoiser(stack, bench, "d1")
    first = make_job()
    small = FakePrepost(bench.bus, "p2", image_processes=1)
    small.hold = asyncio.Event()
    bench.prepost.hold = asyncio.Event()
    bench.prepost.going.clear()  # the bench's own is out of the way
    async with AsyncExitStack() as here:
        await another(here, bench, "p2", small)
        await bench.submit(first)
        await small.news.until(lambda: small.asked == [f"inspect {first.job_id}"])
        waiting, last = make_job(), make_job()
        await bench.submit(waiting, last)
        await asyncio.sleep(1.5)
        freed_s = time.monotonic()
        for job in (waiting, first):
            await bench.cancel(job)
            assert (await bench.ended(job)).state is JobState.CANCELLED
        await small.news.until(lambda: len(small.asked) == 2)
        assert small.asked[1] == f"inspect {last.job_id}", "what waited for room was not asked"
        since_ms = 1000 * (time.monotonic() - freed_s)
        assert small.remaining_ms[1] > 120_000 - since_ms - 1, "its time begins where it is computed"
        small.hold.set()
        await all_completed(bench, [last])


async def test_an_instance_with_another_version_of_the_model_is_asked_nothing(
    bench: Bench, stack: AsyncExitStack
) -> None:
    await denoiser(stack, bench, "d1")
    newer = CARD.model_copy(update={"digest": "e" * 64})
    other = await another(stack, bench, "p2", FakePrepost(bench.bus, "p2", card=newer))
    jobs = [make_job() for _ in range(8)]
    await bench.submit(*jobs)
    await all_completed(bench, jobs)
    assert other.asked == []


async def test_unexpected_errors_end_no_job_however_many(bench: Bench, stack: AsyncExitStack) -> None:
    await denoiser(stack, bench, "d1")
    failures = iter([InternalError()] * 5)

    def fail(_verb: str) -> None:
        for error in failures:
            raise error

    bench.prepost.fail = fail
    job = await bench.submitted()
    await all_completed(bench, [job])


async def test_a_job_outlasts_workers_that_fall_silent_one_after_the_other(
    bench: Bench, stack: AsyncExitStack
) -> None:
    """Five, more than a job has attempts: none of them has died."""
    job = make_job()
    for count in range(5):
        worker = await denoiser(stack, bench, f"d{count}")
        worker.going.clear()
        if not count:
            await bench.submit(job)
        await worker.news.until(lambda worker=worker: bool(worker.requests))  # type: ignore[misc]  # bound per turn
        worker.fall_silent()
    await denoiser(stack, bench, "d-last")
    await all_completed(bench, [job])
    record = await bench.records.get(job.job_id)
    assert (record.attempt, record.rows[0].failures) == (6, 2)


async def test_an_accepted_job_of_a_dead_router_is_prepared_by_the_next(
    bench: Bench, nats_account: str
) -> None:
    """Its question is still at the instance, which has one process."""
    async with AsyncExitStack() as stack:
        bench.prepost.going.clear()
        small = await another(stack, bench, "p2", FakePrepost(bench.bus, "p2", image_processes=1))
        small.hold = asyncio.Event()
        first = await stack.enter_async_context(running_router(nats_account, "router-a"))
        await denoiser(stack, bench, "d1")
        job = await bench.submitted()
        await small.news.until(lambda: len(small.asked) == 1)
        await stack.enter_async_context(running_router(nats_account, "router-b"))
        first.cancel()
        await small.news.until(lambda: len(small.asked) == 2)
        small.hold.set()
        await all_completed(bench, [job])
