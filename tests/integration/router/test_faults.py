"""The router against real NATS and JetStream: every accepted job ends once, whatever dies on the way."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import nats.errors
import pytest

from giornata.deadlines import Deadline
from giornata.records import Change, JobRecordStore, Quarantine, RecordRevision
from giornata.wire import subjects
from giornata.wire.errors import (
    AttemptsExhausted,
    InteractiveQueueFull,
    JobNotFound,
    QueueTooLong,
)
from giornata.wire.jobs import Job, JobRecord, JobState
from giornata.wire.messages import JobEstimate, JobEstimateRequest
from giornata.wire.requests import Reuse
from giornata.wire.workers import QueueState, ServiceName, ServiceState
from giornata_router import job_records
from tests.fakes.fleet import CARD
from tests.fakes.news import News
from tests.fakes.virtual_time import VirtualLoop
from tests.integration.router.bench import COSTS, IMAGE, Bench, denoiser, make_job, running_router
from tests.patience import HUNG_MS, HUNG_S
from tests.present import present


async def test_a_job_completes_once_with_every_stage_recorded(bench: Bench, stack: AsyncExitStack) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    await denoiser(stack, bench, "d1")
    bench.prepost.fail = lambda _verb: loop.pass_time(0.25)
    job = await bench.submitted(n=3)
    event = await bench.ended(job)
    record = await bench.records.get(job.job_id)
    assert event.state is record.state is JobState.COMPLETED
    assert [row.image.key for row in record.rows if row.image] == ["image0", "image1", "image2"]
    assert [row.seed for row in record.rows] == [7, 8, 9]
    assert sorted(bench.prepost.calls) == ["encode", "finish", "finish", "finish", "inspect"]
    assert bench.done_count[job.job_id] == 1
    assert event.stage_ms.prepare == pytest.approx(500), "inspecting and encoding"
    assert event.stage_ms.finish == pytest.approx(750), "three pictures"


async def test_of_two_edits_under_one_id_the_one_in_the_record_is_carried_out(
    bench: Bench, stack: AsyncExitStack
) -> None:
    worker = await denoiser(stack, bench, "d1", step_s=0.05)
    job = make_job()
    other = job.model_copy(update={"image": IMAGE.model_copy(update={"key": "another"})})
    await asyncio.gather(bench.submit(job), bench.submit(other))
    assert (await bench.ended(job)).state is JobState.COMPLETED
    [request] = worker.requests
    assert request.job == (await bench.records.get(job.job_id)).job
    assert request.job in [job, other]


async def test_a_lost_worker_is_replaced_and_its_late_report_discarded(
    bench: Bench, stack: AsyncExitStack
) -> None:
    first = await denoiser(stack, bench, "d1")
    first.going.clear()
    job = await bench.submitted()
    await first.news.until(lambda: bool(first.requests))
    second = await denoiser(stack, bench, "d2")
    first.die()
    record = await bench.completed(job)
    assert (record.attempt, len(record.causes)) == (2, 1)
    assert len(second.requests) == 1
    assert bench.done_count[job.job_id] == 1


async def test_a_job_that_loses_every_worker_fails_clearly(bench: Bench, stack: AsyncExitStack) -> None:
    workers = [await denoiser(stack, bench, f"d{i}", step_s=60) for i in range(3)]
    news = News()
    for worker in workers:
        worker.news = news
    job = await bench.submitted()
    for count in range(1, 4):
        await news.until(lambda count=count: sum(len(w.requests) for w in workers) == count)  # type: ignore[misc]  # bound per turn
        next(w for w in workers if w.requests and not w.silent.is_set()).die()
    event = await bench.ended(job)
    assert event.state is JobState.FAILED
    assert present(event.error).code == "attempts_exhausted"
    kept = await (await Quarantine.open(bench.bus.jetstream)).get(job.job_id)
    assert kept.state is JobState.FAILED
    assert len(kept.causes) == 3
    assert all("fell silent" in cause for cause in kept.causes)
    found = await (await Quarantine.open(bench.bus.jetstream)).all()
    assert [record.job.job_id for record in found] == [job.job_id]


async def test_rows_leave_a_worker_whose_step_does_not_end(bench: Bench, stack: AsyncExitStack) -> None:
    stuck = await denoiser(stack, bench, "a-stuck", step_s=60)
    job = await bench.submitted(reuse=Reuse.OFF)
    await stuck.news.until(lambda: bool(stuck.requests))
    await denoiser(stack, bench, "b-free")
    stuck.stepping_ms = 60_000.0
    record = await bench.completed(job)
    assert (record.attempt, len(record.causes)) == (2, 1)
    assert record.causes == ("attempt 1 on a-stuck: the worker's step did not end",)
    again = await bench.submitted(reuse=Reuse.OFF)
    assert (await bench.ended(again)).state is JobState.COMPLETED
    assert len(stuck.requests) == 1, "it gets nothing until its step has ended"


async def test_whoever_submits_is_told_when_and_whoever_would_end_too_late_is_refused(
    bench: Bench, stack: AsyncExitStack
) -> None:
    worker = await denoiser(stack, bench, "d1", step_s=0.01, costs=COSTS, capacity=4)
    warm = await bench.submitted()
    await bench.ended(warm)
    worker.going.clear()
    job = await bench.submitted(n=4)
    request = JobEstimateRequest(job_id=job.job_id, remaining_ms=HUNG_MS)
    forecast = await bench.bus.call(subjects.FORECAST, request, JobEstimate, Deadline.after_ms(HUNG_MS))
    assert forecast.position == 0
    assert present(forecast.finish_ms) > 0
    with pytest.raises(QueueTooLong) as refused:
        await bench.submit(make_job(n=4, budget_ms=1))
    assert refused.value.retry_after_s
    worker.going.set()
    await bench.ended(job)
    with pytest.raises(JobNotFound):
        await bench.bus.call(subjects.FORECAST, request, JobEstimate, Deadline.after_ms(HUNG_MS))


async def test_what_encoding_and_decoding_took_is_part_of_what_is_foretold(
    bench: Bench, stack: AsyncExitStack
) -> None:
    await denoiser(stack, bench, "d1", step_s=0.01, costs=COSTS)

    async def foretold_s(job: Job) -> float:
        request = JobEstimateRequest(job_id=job.job_id, remaining_ms=HUNG_MS)
        told = await bench.bus.call(subjects.FORECAST, request, JobEstimate, Deadline.after_ms(HUNG_MS))
        return present(told.finish_ms) / 1e3

    bench.prepost.took_ms = {"encode": 500, "finish": 1000}
    first = await bench.submitted()
    await bench.ended(first)
    bench.prepost.hold = asyncio.Event()
    second = await bench.submitted()
    assert 1.5 < await foretold_s(second) < 3
    bench.prepost.hold.set()
    await bench.ended(second)


async def test_a_draining_worker_hands_its_rows_on_with_their_state(
    bench: Bench, stack: AsyncExitStack
) -> None:
    first = await denoiser(stack, bench, "d1", step_s=0.3)
    job = await bench.submitted()
    await first.news.until(lambda: bool(first.running) and next(iter(first.running.values()))[1] >= 2)
    first.going.clear()
    second = await denoiser(stack, bench, "d2")
    await first.drain()
    assert (await bench.ended(job)).state is JobState.COMPLETED
    resume = present(second.requests[0].rows[0].resume)
    assert resume.step >= 2
    assert not (await bench.records.get(job.job_id)).causes


async def test_the_standby_finishes_what_the_dead_router_accepted(bench: Bench, nats_account: str) -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(running_router(nats_account, "router-a"))
        worker = await denoiser(stack, bench, "d1", step_s=0.4)
        jobs = [make_job() for _ in range(4)]
        await bench.submit(*jobs)
        await worker.news.until(lambda: bool(worker.requests))
        await stack.enter_async_context(running_router(nats_account, "router-b"))
        first.cancel()
        for job in jobs:
            assert (await bench.ended(job)).state is JobState.COMPLETED
        records = [await bench.records.get(job.job_id) for job in jobs]
        assert all(len(record.causes) == 0 for record in records), "the worker lived, so nothing was lost"
        assert {request.attempt for request in worker.requests} == {1}


async def test_a_full_queue_refuses_and_keeps_what_it_has(bench: Bench, nats_account: str) -> None:
    async with running_router(nats_account, "router-a", queue_limit=2):
        kept = [make_job(), make_job()]
        await bench.submit(*kept)
        with pytest.raises(InteractiveQueueFull) as refused:
            await bench.submit(make_job())
        assert refused.value.retry_after_s
        async with AsyncExitStack() as stack:
            await denoiser(stack, bench, "d1")
            for job in kept:
                assert (await bench.ended(job)).state is JobState.COMPLETED
            await bench.submit(make_job())


@pytest.mark.parametrize(("limit", "full"), [(1, True), (2, False)])
async def test_the_router_tells_who_waits_for_a_worker_and_whether_more_may(
    bench: Bench, nats_account: str, limit: int, full: bool
) -> None:
    told: asyncio.Queue[ServiceState] = asyncio.Queue()
    telemetry = subjects.telemetry(ServiceName.ROUTER, "r1")
    async with (
        bench.bus.listen(telemetry, ServiceState, told.put_nowait),
        running_router(nats_account, "r1", queue_limit=limit),
    ):
        await bench.submit(make_job(n=3))
        async with asyncio.timeout(HUNG_S):
            while (state := await told.get()).queue is None or not state.queue.jobs:
                pass
    assert state.queue == QueueState(jobs=1, rows=3, steps=3 * CARD.default_steps, full=full)


CAUSES = (
    "attempt 1 on d1: it fell silent",
    "attempt 2 on d2: it fell silent",
    "attempt 3 on d3: it fell silent",
)


def _ends(change: Change[JobRecord], record: JobRecord) -> bool:
    following = change(record)
    return following is not None and following.state.terminal


@pytest.mark.parametrize("broken", ["before the quarantine", "before the terminal record"])
async def test_a_job_is_in_quarantine_though_the_connection_breaks(
    bench: Bench, nats_account: str, broken: str
) -> None:
    breaks = [broken]

    def break_once(where: str) -> None:
        if where in breaks:
            breaks.remove(where)
            raise nats.errors.TimeoutError

    class UnsteadyQuarantine(Quarantine):
        async def put(self, record: JobRecord) -> int:
            break_once("before the quarantine")
            return await super().put(record)

    class UnsteadyRecords(JobRecordStore):
        async def revise(
            self, key: str, change: Change[JobRecord], known: RecordRevision[JobRecord] | None = None
        ) -> RecordRevision[JobRecord]:
            if _ends(change, await self.get(key)):
                break_once("before the terminal record")
            return await super().revise(key, change, known)

    job = make_job()
    record = job_records.accepted(job)
    lost = tuple(row.model_copy(update={"failures": 3, "attempt": 3}) for row in record.rows)
    await bench.records.create(record.model_copy(update={"rows": lost, "attempt": 3, "causes": CAUSES}))
    async with running_router(
        nats_account, "router-a", records_of=UnsteadyRecords, quarantine_of=UnsteadyQuarantine
    ):
        await bench.submit(job)
        event = await bench.ended(job)
    assert not breaks, "the connection broke"
    assert event.error is not None
    assert event.error.code == AttemptsExhausted.code
    kept = await (await Quarantine.open(bench.bus.jetstream)).get(job.job_id)
    assert (kept.state, kept.causes, kept.error) == (JobState.FAILED, CAUSES, event.error)
    assert bench.done_count[job.job_id] == 1
