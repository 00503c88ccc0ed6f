"""Pictures of one job at several workers, each piece as durable as a whole job, and rows that give way to others."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from giornata.wire.jobs import Job, JobState
from giornata.wire.requests import Reuse
from tests.fakes.denoiser import FakeDenoiser
from tests.integration.router.bench import Bench, denoiser, make_job, running_router


def pictures(n: int) -> Job:
    """A job that no worker is better for than another."""
    return make_job(n=n, reuse=Reuse.OFF)


async def held(*workers: FakeDenoiser) -> None:
    """Until each has begun; their steps do not end before :func:`release`."""
    for worker in workers:
        await worker.news.until(lambda worker=worker: bool(worker.running))  # type: ignore[misc]  # bound per turn


def hold(*workers: FakeDenoiser) -> None:
    for worker in workers:
        worker.going.clear()


def release(*workers: FakeDenoiser) -> None:
    for worker in workers:
        worker.going.set()


def rows_of(worker: FakeDenoiser) -> list[list[int]]:
    """Indices of the rows of every request that it took."""
    return [[row.index for row in request.rows] for request in worker.requests]


async def completed(bench: Bench, job: Job) -> None:
    """Once, with all pictures."""
    record = await bench.completed(job)
    assert all(row.image is not None for row in record.rows)
    assert bench.done_count[job.job_id] == 1


async def test_pictures_are_computed_side_by_side_in_one_attempt_a_worker(
    bench: Bench, stack: AsyncExitStack
) -> None:
    workers = [await denoiser(stack, bench, name, capacity=2) for name in ("d1", "d2")]
    hold(*workers)
    job = pictures(4)
    await bench.submit(job)
    await held(*workers)
    record = await bench.records.get(job.job_id)
    assert [(a.attempt, len(a.rows)) for a in record.assignments] == [(1, 2), (2, 2)]
    release(*workers)
    await completed(bench, job)
    (first,), (second,) = map(rows_of, workers)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert (await bench.records.get(job.job_id)).attempt == 2


async def test_what_finds_no_room_follows_when_there_is_some(bench: Bench, stack: AsyncExitStack) -> None:
    worker = await denoiser(stack, bench, "d1", capacity=2)
    hold(worker)
    job, later = pictures(5), pictures(1)
    await bench.submit(job)
    await held(worker)
    await bench.submit(later)
    release(worker)
    await completed(bench, job)
    assert (await bench.ended(later)).state is JobState.COMPLETED
    mine = [request for request in worker.requests if request.job.job_id == job.job_id]
    assert [row.index for request in mine for row in request.rows] == [0, 1, 2, 3, 4]
    assert len(mine) >= 3
    assert max(len(request.rows) for request in mine) == 2


async def test_only_what_was_lost_with_its_worker_is_computed_again(
    bench: Bench, stack: AsyncExitStack
) -> None:
    dying, going = [await denoiser(stack, bench, name, capacity=2) for name in ("d1", "d2")]
    hold(dying, going)
    job = pictures(4)
    await bench.submit(job)
    await held(dying, going)
    dying.die()
    release(going)
    await completed(bench, job)
    (lost,), (kept, again) = rows_of(dying), rows_of(going)
    assert sorted(lost + kept) == [0, 1, 2, 3]
    assert again == lost, "together"
    record = await bench.records.get(job.job_id)
    assert (record.attempt, len(record.causes)) == (3, 1)
    assert sorted(row.failures for row in record.rows) == [0, 0, 1, 1]


async def test_another_router_takes_all_pieces_over(bench: Bench, nats_account: str) -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(running_router(nats_account, "r1"))
        workers = [await denoiser(stack, bench, name, capacity=2) for name in ("d1", "d2")]
        hold(*workers)
        job = pictures(5)
        await bench.submit(job)
        await held(*workers)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await stack.enter_async_context(running_router(nats_account, "r2"))
        release(*workers)
        await completed(bench, job)
        every = [row for worker in workers for rows in rows_of(worker) for row in rows]
        assert sorted(every) == [0, 1, 2, 3, 4], "nothing is computed twice"
        record = await bench.records.get(job.job_id)
        assert (record.attempt, len(record.causes)) == (3, 0)


async def test_a_cancelled_job_leaves_every_worker(bench: Bench, stack: AsyncExitStack) -> None:
    workers = [await denoiser(stack, bench, name, capacity=2) for name in ("d1", "d2")]
    hold(*workers)
    job = pictures(6)
    await bench.submit(job)
    await held(*workers)
    await bench.cancel(job)
    assert (await bench.ended(job)).state is JobState.CANCELLED
    for worker in workers:
        await worker.news.until(lambda worker=worker: job.job_id in worker.cancelled)  # type: ignore[misc]  # bound per turn
    assert not (await bench.records.get(job.job_id)).assignments


async def test_a_worker_that_drains_hands_on_its_pictures_alone(bench: Bench, stack: AsyncExitStack) -> None:
    leaving, staying = [await denoiser(stack, bench, name, capacity=2) for name in ("d1", "d2")]
    hold(leaving, staying)
    job = pictures(4)
    await bench.submit(job)
    await held(leaving, staying)
    await leaving.drain()
    release(staying)
    await completed(bench, job)
    assert sorted(row for rows in rows_of(staying) for row in rows) == [0, 1, 2, 3]
    assert not (await bench.records.get(job.job_id)).causes


async def test_rows_of_one_tenant_give_way_to_another_s_and_go_on_from_their_step(
    bench: Bench, nats_account: str
) -> None:
    """Alice's long edits fill the worker and its queue; bob's comes at once and is the only one that may end."""
    worker = FakeDenoiser(bench.bus, bench.records, "d1", capacity=2)
    worker.going.clear()
    async with running_router(nats_account, "r"), worker.run():
        alices = [make_job(reuse=Reuse.OFF, tenant="alice") for _ in range(6)]
        await bench.submit(*alices)
        await worker.news.until(lambda: len(worker.running) == 2)
        bobs = await bench.submitted(reuse=Reuse.OFF, tenant="bob")
        await worker.news.until(lambda: any(one.job.tenant == "bob" for one in worker.requests))
        backs = set(worker.cancelled)
        assert backs
        assert backs <= {job.job_id for job in alices}
        worker.going.set()
        ended = [await bench.ended(job) for job in (bobs, *alices)]
    assert [event.state for event in ended] == [JobState.COMPLETED] * 7
    for back in backs:
        assert worker.cancelled.count(back) == 1, "its worker is told once to hand the rows back"
        assert (await bench.records.get(back)).causes == ()
        assert any(one.job.job_id == back and one.rows[0].resume for one in worker.requests)
