"""Stages of a job that fail, are silent, take long or are told again; and a job that ends before its time."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from giornata.fleet import SILENCE_S
from giornata.wire.errors import GiornataError, ImageTimeout, ImageUnreadable
from giornata.wire.jobs import Encoding, Job, JobState, Priority
from giornata.wire.requests import Reuse
from giornata_router import job_records
from tests.fakes.denoiser import FakeDenoiser
from tests.fakes.fleet import INSPECTION, REF
from tests.integration.router.bench import Bench, denoiser, make_job, open_bench, running_router


async def test_one_poisoned_row_leaves_the_others_their_pictures(bench: Bench, stack: AsyncExitStack) -> None:
    worker = await denoiser(stack, bench, "d1")
    worker.poisoned = {1}
    job = await bench.submitted(n=2)
    record = await bench.completed(job)
    assert record.rows[0].image is not None
    assert record.rows[1].error is not None
    assert record.rows[1].error.code == "row_poisoned"


async def test_regions_are_rows_of_one_picture(bench: Bench, stack: AsyncExitStack) -> None:
    for name in ("d1", "d2"):
        await denoiser(stack, bench, name)
    job = make_job().model_copy(update={"mask": REF, "regions": (REF,) * 3})
    await bench.submit(job)
    record = await bench.completed(job)
    assert [row.seed - record.rows[0].seed for row in record.rows] == [0, 1, 2]
    assert [row.image is not None for row in record.rows] == [True, False, False]
    assert [row.error for row in record.rows] == [None] * 3
    (asked,) = bench.prepost.finished
    assert (asked.index, asked.job.row_count, len(asked.others)) == (0, 3, 2)
    assert record.told_rows == record.rows[:1]


async def test_a_picture_of_regions_lacks_none(bench: Bench, stack: AsyncExitStack) -> None:
    worker = await denoiser(stack, bench, "d1")
    worker.poisoned = {1}
    job = make_job().model_copy(update={"mask": REF, "regions": (REF,) * 3})
    await bench.submit(job)
    event = await bench.ended(job)
    assert (event.state, event.error and event.error.code) == (JobState.FAILED, "row_poisoned")
    assert bench.prepost.finished == []


@pytest.mark.parametrize("error", [ImageUnreadable(), ImageTimeout(received="more than 10 s")])
async def test_a_bad_image_fails_the_job_at_once_with_its_own_code_and_no_other(
    bench: Bench, stack: AsyncExitStack, error: GiornataError
) -> None:
    await denoiser(stack, bench, "d1")

    def fail(_verb: str) -> None:
        raise error

    bench.prepost.fail = fail
    bad = await bench.submitted()
    event = await bench.ended(bad)
    assert (event.state, event.error and event.error.code) == (JobState.FAILED, error.code)
    assert bench.prepost.calls == ["inspect"]
    bench.prepost.fail = lambda _verb: None
    good = await bench.submitted()
    assert (await bench.ended(good)).state is JobState.COMPLETED


@pytest.mark.parametrize("verb", ["inspect", "encode", "finish"])
async def test_a_question_that_nobody_has_is_asked_again(
    bench: Bench, stack: AsyncExitStack, verb: str
) -> None:
    """Soon, and not after the stage's limit of two minutes: it was lost on its way, or its answer was."""
    await denoiser(stack, bench, "d1")
    bench.prepost.lost.add(verb)
    job = await bench.submitted()
    assert (await bench.ended(job)).state is JobState.COMPLETED
    assert bench.prepost.calls.count(verb) == 2


async def test_a_question_that_takes_its_time_is_asked_once(bench: Bench, stack: AsyncExitStack) -> None:
    await denoiser(stack, bench, "d1")
    bench.prepost.hold = asyncio.Event()
    job = await bench.submitted()
    await asyncio.sleep(SILENCE_S + 2)  # in which it would have been asked again
    bench.prepost.hold.set()
    assert (await bench.ended(job)).state is JobState.COMPLETED
    assert sorted(bench.prepost.calls) == ["encode", "finish", "inspect"]


async def test_a_job_waits_for_a_prepost_that_is_away(nats_account: str) -> None:
    async with AsyncExitStack() as stack:
        bench = await stack.enter_async_context(open_bench(nats_account))
        await stack.enter_async_context(running_router(nats_account, "router-a"))
        await denoiser(stack, bench, "d1")
        job = await bench.submitted()
        await asyncio.sleep(3)  # longer than any number of tries would last
        await stack.enter_async_context(bench.prepost.run())
        assert (await bench.ended(job)).state is JobState.COMPLETED


@pytest.mark.parametrize("priority", list(Priority))
async def test_cancel_ends_the_job_and_frees_the_worker(
    bench: Bench, stack: AsyncExitStack, priority: Priority
) -> None:
    worker = await denoiser(stack, bench, "d1", step_s=30)
    job = await bench.submitted(priority=priority)
    await worker.news.until(lambda: bool(worker.requests))
    await bench.cancel(job)
    event = await bench.ended(job)
    assert (event.state, event.error and event.error.code) == (JobState.CANCELLED, "job_cancelled")
    await worker.news.until(lambda: worker.cancelled == [job.job_id])


async def test_the_budget_ends_a_job_that_no_worker_takes(bench: Bench, stack: AsyncExitStack) -> None:
    job = await bench.submitted(budget_ms=4000)
    event = await bench.ended(job)
    assert event.error is not None
    assert event.error.code == "deadline_exceeded"
    assert "waiting for a worker" in event.error.message


WHOLE = INSPECTION.model_copy(
    update={"prepared": None, "template_key": "", "compute_tokens": INSPECTION.tokens, "mask_ratio": 1.0}
)


async def test_a_job_without_image_is_carried_to_its_end(bench: Bench, stack: AsyncExitStack) -> None:
    await denoiser(stack, bench, "d1")
    bench.prepost.inspection = WHOLE
    job = make_job(n=2, reuse=Reuse.OFF).model_copy(update={"image": None})
    await bench.submit(job)
    record = await bench.completed(job)
    assert record.job.image is None
    assert len(record.images) == 2
    assert bench.prepost.calls == ["inspect", "encode", "finish", "finish"]


def test_it_costs_whole_rows_and_leaves_only_what_was_made_of_it() -> None:
    record = job_records.accepted(make_job(n=2, reuse=Reuse.OFF).model_copy(update={"image": None}))
    demand = job_records.demand(record, WHOLE, record.rows, None)
    assert demand.template is None
    assert [(shape.image, shape.computed) for shape in demand.shapes] == [(WHOLE.tokens, WHOLE.tokens)] * 2
    encoding = Encoding(text=REF, text_tokens=1, rows=())
    made = record.model_copy(update={"inspection": WHOLE, "encoding": encoding})
    assert list(job_records.of_record(made)) == [REF]


# Pictures of one job at several workers, each piece as durable as a whole job, and rows that give way to
# others.


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
