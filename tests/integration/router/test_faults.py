"""The router against real NATS and JetStream: every accepted job ends once, whatever dies on the way."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from giornata.bus import bus as buses
from giornata.bus import streams
from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.fleet import SILENCE_S
from giornata.records.jobs import Records
from giornata.records.quarantine import Quarantine
from giornata.scheduling.line import AGEING_S
from giornata.scheduling.policies import PolicyName
from giornata.wire import codec, stores, subjects
from giornata.wire.errors import (
    GiornataError,
    ImageUnreadable,
    InternalError,
    JobNotFound,
    QueueFull,
    QueueTooLong,
    ServiceUnavailable,
)
from giornata.wire.events import DoneEvent, EventKind
from giornata.wire.jobs import BlobRef, Job, JobState, Priority
from giornata.wire.messages import Accepted, CancelRows, Forecast, ForecastRequest, RunAnswer, SubmitRequest
from giornata.wire.permissions import User
from giornata.wire.requests import EditParameters, Reuse, resolve
from giornata.wire.workers import CostFit, QueueState, ServiceName, ServiceState, WorkerCosts
from giornata_router.config import RouterConfig
from giornata_router.service import Router
from tests.fakes.fleet import CARD, FakeDenoiser, FakePrepost
from tests.fakes.news import News
from tests.integration.conftest import NatsServer

FIT = CostFit(weights=(0.0, 0.0, 0.1, 0.0, 0.0), r2=1.0, residual_ms=0.0, samples=1, outliers=0)
COSTS = WorkerCosts(compute=FIT, load=FIT.model_copy(update={"weights": (0.0, 0.0)}), device="cpu")
IMAGE = BlobRef(key="image", size_bytes=1, sha256="0" * 64)


def make_job(
    *,
    n: int = 1,
    budget_ms: int = 20_000,
    priority: Priority = Priority.INTERACTIVE,
    reuse: Reuse = Reuse.AUTO,
    tenant: str = "default",
    weight: float = 1.0,
    slo_ms: int | None = None,
) -> Job:
    asked = EditParameters(prompt="a red star", n=n, reuse=reuse, slo_ms=slo_ms)
    return Job(
        job_id=f"job_{secrets.token_hex(8)}",
        tenant=tenant,
        weight=weight,
        gateway="gateway-test",
        priority=priority,
        model=CARD.name,
        model_digest=CARD.digest,
        parameters=resolve(asked, CARD, seed=7),
        image=IMAGE,
        budget_ms=budget_ms,
        result_ttl_s=60,
    )


class Bench:
    """A bus, the records, a prepost, and what the gateway would see."""

    def __init__(self, bus: Bus, records: Records, prepost: FakePrepost) -> None:
        self.bus = bus
        self.records = records
        self.prepost = prepost
        self.done: dict[str, asyncio.Future[DoneEvent]] = {}
        self.done_count: dict[str, int] = {}

    def hear(self, event: DoneEvent) -> None:
        self.done_count[event.job_id] = self.done_count.get(event.job_id, 0) + 1
        future = self.done.setdefault(event.job_id, asyncio.get_running_loop().create_future())
        if not future.done():
            future.set_result(event)

    async def submit(self, job: Job) -> Accepted:
        self.done.setdefault(job.job_id, asyncio.get_running_loop().create_future())
        request = SubmitRequest(job=job, remaining_ms=job.budget_ms)
        while True:
            try:
                return await self.bus.call(subjects.SUBMIT, request, Accepted, Deadline.after_ms(5000))
            except ServiceUnavailable:
                await asyncio.sleep(0.1)

    async def ended(self, job: Job, timeout_s: float = 20) -> DoneEvent:
        return await asyncio.wait_for(self.done[job.job_id], timeout_s)


@pytest.fixture
async def bench(private_nats: NatsServer) -> AsyncIterator[Bench]:
    async with buses.connect(private_nats.url, "bench") as bus:
        await streams.ensure(bus.jetstream, replicas=1, events_ttl_s=60)
        prepost = FakePrepost(bus)
        bench = Bench(bus, await Records.open(bus.jetstream), prepost)
        done = subjects.events_of_gateway("gateway-test", EventKind.DONE)
        async with bus.listen(done, DoneEvent, bench.hear), prepost.run():
            yield bench


@asynccontextmanager
async def running_router(
    url: str,
    name: str,
    *,
    queue_limit: int = 100,
    max_interactive: int = 512,
    max_batch: int = 256,
    replicas: int = 1,
    password_file: Path | None = None,
    policy: PolicyName = PolicyName.FINISH_TIME,
    ageing_s: float = AGEING_S,
) -> AsyncIterator[asyncio.Task[None]]:
    """A router on a connection of its own; cancelling the task is its sudden death."""
    config = RouterConfig(
        nats_url=url,
        instance=name,
        telemetry_hz=10,
        queue_limit=queue_limit,
        max_interactive=max_interactive,
        max_batch=max_batch,
        stage_tries=2,
        inspect_s=120,
        policy=policy,
        ageing_s=ageing_s,
    )
    stop = asyncio.Event()

    async def live() -> None:
        async with buses.connect(url, name, user=User.ROUTER, password_file=password_file) as bus:
            await streams.ensure_queue(bus.jetstream, replicas=replicas, queue_limit=queue_limit)
            records, quarantine = await Records.open(bus.jetstream), await Quarantine.open(bus.jetstream)
            await Router(bus, records, quarantine, config).run(stop)

    task = asyncio.create_task(live())
    try:
        yield task
    finally:
        stop.set()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def stack(bench: Bench, private_nats: NatsServer) -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_router(private_nats.url, "router-a"))
        yield stack


async def denoiser(stack: AsyncExitStack, bench: Bench, name: str, **options: object) -> FakeDenoiser:
    fake = FakeDenoiser(bench.bus, bench.records, name, **options)  # type: ignore[arg-type]  # test options
    await stack.enter_async_context(fake.run())
    return fake


async def test_a_job_completes_once_with_every_stage_recorded(bench: Bench, stack: AsyncExitStack) -> None:
    await denoiser(stack, bench, "d1")
    job = make_job(n=3)
    await bench.submit(job)
    event = await bench.ended(job)
    record = await bench.records.get(job.job_id)
    assert event.state is record.state is JobState.COMPLETED
    assert [row.image.key for row in record.rows if row.image] == ["image0", "image1", "image2"]
    assert [row.seed for row in record.rows] == [7, 8, 9]
    assert sorted(bench.prepost.calls) == ["encode", "finish", "finish", "finish", "inspect"]
    assert bench.done_count[job.job_id] == 1
    assert event.stage_ms.prepare > 0
    assert event.stage_ms.finish > 0


async def test_submitting_twice_runs_once(bench: Bench, stack: AsyncExitStack) -> None:
    worker = await denoiser(stack, bench, "d1", step_s=0.05)
    job = make_job()
    await asyncio.gather(bench.submit(job), bench.submit(job))
    assert (await bench.ended(job)).state is JobState.COMPLETED
    assert len(worker.requests) == 1


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
    first = await denoiser(stack, bench, "d1", step_s=5)
    job = make_job()
    await bench.submit(job)
    await first.news.until(lambda: bool(first.requests))
    second = await denoiser(stack, bench, "d2")
    first.die()
    assert (await bench.ended(job)).state is JobState.COMPLETED
    record = await bench.records.get(job.job_id)
    assert (record.attempt, record.failures) == (2, 1)
    assert len(second.requests) == 1
    assert bench.done_count[job.job_id] == 1


async def test_a_job_that_loses_every_worker_fails_clearly(bench: Bench, stack: AsyncExitStack) -> None:
    workers = [await denoiser(stack, bench, f"d{i}", step_s=60) for i in range(3)]
    news = News()
    for worker in workers:
        worker.news = news
    job = make_job()
    await bench.submit(job)
    for count in range(1, 4):
        await news.until(lambda count=count: sum(len(w.requests) for w in workers) == count)  # type: ignore[misc]  # bound per turn
        next(w for w in workers if w.requests and not w._silent.is_set()).die()
    event = await bench.ended(job, 30)
    assert event.state is JobState.FAILED
    assert event.error is not None
    assert event.error.code == "attempts_exhausted"
    kept = await (await Quarantine.open(bench.bus.jetstream)).get(job.job_id)
    assert kept.state is JobState.FAILED
    assert len(kept.causes) == 3
    assert all("fell silent" in cause for cause in kept.causes)
    found = await (await Quarantine.open(bench.bus.jetstream)).all()
    assert [record.job.job_id for record in found] == [job.job_id]


async def test_rows_leave_a_worker_whose_step_does_not_end(bench: Bench, stack: AsyncExitStack) -> None:
    stuck = await denoiser(stack, bench, "a-stuck", step_s=60)
    job = make_job(reuse=Reuse.OFF)
    await bench.submit(job)
    await stuck.news.until(lambda: bool(stuck.requests))
    await denoiser(stack, bench, "b-free")
    stuck.stepping_ms = 60_000.0
    assert (await bench.ended(job)).state is JobState.COMPLETED
    record = await bench.records.get(job.job_id)
    assert (record.attempt, record.failures) == (2, 1)
    assert record.causes == ("attempt 1 on a-stuck: the worker's step did not end",)
    again = make_job(reuse=Reuse.OFF)
    await bench.submit(again)
    assert (await bench.ended(again)).state is JobState.COMPLETED
    assert len(stuck.requests) == 1, "it gets nothing until its step has ended"


async def test_whoever_submits_is_told_when_and_whoever_would_end_too_late_is_refused(
    bench: Bench, stack: AsyncExitStack
) -> None:
    await denoiser(stack, bench, "d1", step_s=0.01, costs=COSTS, capacity=4)
    warm = make_job()
    await bench.submit(warm)
    await bench.ended(warm)
    job = make_job(n=4)
    await bench.submit(job)
    request = ForecastRequest(job_id=job.job_id, remaining_ms=1000)
    forecast = await bench.bus.call(subjects.FORECAST, request, Forecast, Deadline.after_ms(1000))
    assert forecast.position == 0
    assert forecast.finish_ms > 0
    with pytest.raises(QueueTooLong) as refused:
        await bench.submit(make_job(n=4, budget_ms=1))
    assert refused.value.retry_after_s
    await bench.ended(job)
    with pytest.raises(JobNotFound):
        await bench.bus.call(subjects.FORECAST, request, Forecast, Deadline.after_ms(1000))


async def test_what_encoding_and_decoding_took_is_part_of_what_is_foretold(
    bench: Bench, stack: AsyncExitStack
) -> None:
    await denoiser(stack, bench, "d1", step_s=0.01, costs=COSTS)

    async def foretold_s(job: Job) -> float:
        request = ForecastRequest(job_id=job.job_id, remaining_ms=1000)
        told = await bench.bus.call(subjects.FORECAST, request, Forecast, Deadline.after_ms(1000))
        return told.finish_ms / 1e3

    def slow(verb: str) -> None:
        if verb in held:
            bench.prepost.hold = asyncio.Event()
            asyncio.get_running_loop().call_later(held.pop(verb), bench.prepost.hold.set)

    held, bench.prepost.fail = {"encode": 0.5, "finish": 1.0}, slow
    first = make_job()
    await bench.submit(first)
    await bench.ended(first)
    bench.prepost.hold = asyncio.Event()
    second = make_job()
    await bench.submit(second)
    assert 1.5 < await foretold_s(second) < 3
    bench.prepost.hold.set()
    await bench.ended(second)


async def test_a_full_worker_is_passed_over(bench: Bench, stack: AsyncExitStack) -> None:
    full = await denoiser(stack, bench, "a-full")
    full.answer = RunAnswer.FULL
    free = await denoiser(stack, bench, "b-free")
    job = make_job()
    await bench.submit(job)
    assert (await bench.ended(job)).state is JobState.COMPLETED
    assert len(free.requests) == 1
    record = await bench.records.get(job.job_id)
    assert record.failures == 0


async def test_a_draining_worker_hands_its_rows_on_with_their_state(
    bench: Bench, stack: AsyncExitStack
) -> None:
    first = await denoiser(stack, bench, "d1", step_s=0.3)
    job = make_job()
    await bench.submit(job)
    await first.news.until(lambda: bool(first._running) and next(iter(first._running.values()))[1] >= 2)
    second = await denoiser(stack, bench, "d2")
    await first.drain()
    assert (await bench.ended(job)).state is JobState.COMPLETED
    resume = second.requests[0].rows[0].resume
    assert resume is not None
    assert resume.step >= 2
    assert (await bench.records.get(job.job_id)).failures == 0


async def test_one_poisoned_row_leaves_the_others_their_pictures(bench: Bench, stack: AsyncExitStack) -> None:
    worker = await denoiser(stack, bench, "d1")
    worker.poisoned = {1}
    job = make_job(n=2)
    await bench.submit(job)
    assert (await bench.ended(job)).state is JobState.COMPLETED
    record = await bench.records.get(job.job_id)
    assert record.rows[0].image is not None
    assert record.rows[1].error is not None
    assert record.rows[1].error.code == "row_poisoned"


async def test_a_bad_image_fails_the_job_with_its_own_code_and_no_other(
    bench: Bench, stack: AsyncExitStack
) -> None:
    await denoiser(stack, bench, "d1")

    def fail(verb: str) -> None:
        if verb == "inspect":
            raise ImageUnreadable

    bench.prepost.fail = fail
    bad = make_job()
    await bench.submit(bad)
    event = await bench.ended(bad)
    assert (event.state, event.error and event.error.code) == (JobState.FAILED, "image_unreadable")
    assert bench.prepost.calls == ["inspect"]
    bench.prepost.fail = lambda _verb: None
    good = make_job()
    await bench.submit(good)
    assert (await bench.ended(good)).state is JobState.COMPLETED


async def test_a_stage_that_fails_once_is_asked_again(bench: Bench, stack: AsyncExitStack) -> None:
    await denoiser(stack, bench, "d1")
    failures = iter([InternalError()])

    def fail(_verb: str) -> None:
        error: GiornataError | None = next(failures, None)
        if error:
            raise error

    bench.prepost.fail = fail
    job = make_job()
    await bench.submit(job)
    assert (await bench.ended(job)).state is JobState.COMPLETED
    assert bench.prepost.calls.count("inspect") == 2


@pytest.mark.parametrize("verb", ["inspect", "encode", "finish"])
async def test_a_question_that_nobody_has_is_asked_again(
    bench: Bench, stack: AsyncExitStack, verb: str
) -> None:
    """Soon, and not after the stage's limit of two minutes: it was lost on its way, or its answer was."""
    await denoiser(stack, bench, "d1")
    bench.prepost.lost.add(verb)
    job = make_job()
    await bench.submit(job)
    assert (await bench.ended(job)).state is JobState.COMPLETED
    assert bench.prepost.calls.count(verb) == 2


async def test_a_question_that_takes_its_time_is_asked_once(bench: Bench, stack: AsyncExitStack) -> None:
    await denoiser(stack, bench, "d1")
    bench.prepost.hold = asyncio.Event()
    job = make_job()
    await bench.submit(job)
    await asyncio.sleep(SILENCE_S + 2)  # in which it would have been asked again
    bench.prepost.hold.set()
    assert (await bench.ended(job)).state is JobState.COMPLETED
    assert sorted(bench.prepost.calls) == ["encode", "finish", "inspect"]


async def test_a_job_waits_for_a_prepost_that_is_away(private_nats: NatsServer) -> None:
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(buses.connect(private_nats.url, "bench"))
        await streams.ensure(bus.jetstream, replicas=1, events_ttl_s=60)
        bench = Bench(bus, await Records.open(bus.jetstream), FakePrepost(bus))
        done = subjects.events_of_gateway("gateway-test", EventKind.DONE)
        await stack.enter_async_context(bus.listen(done, DoneEvent, bench.hear))
        await stack.enter_async_context(running_router(private_nats.url, "router-a"))
        await denoiser(stack, bench, "d1")
        job = make_job()
        await bench.submit(job)
        await asyncio.sleep(3)  # longer than any number of tries would last
        await stack.enter_async_context(bench.prepost.run())
        assert (await bench.ended(job)).state is JobState.COMPLETED


@pytest.mark.parametrize("priority", list(Priority))
async def test_cancel_ends_the_job_and_frees_the_worker(
    bench: Bench, stack: AsyncExitStack, priority: Priority
) -> None:
    worker = await denoiser(stack, bench, "d1", step_s=30)
    job = make_job(priority=priority)
    await bench.submit(job)
    await worker.news.until(lambda: bool(worker.requests))
    await bench.records.change(job.job_id, lambda r: r.model_copy(update={"cancel": True}))
    await bench.bus.publish(subjects.cancel(job.job_id), CancelRows(job_id=job.job_id, attempt=0))
    event = await bench.ended(job)
    assert (event.state, event.error and event.error.code) == (JobState.CANCELLED, "job_cancelled")
    await worker.news.until(lambda: worker.cancelled == [job.job_id])


async def test_the_budget_ends_a_job_that_no_worker_takes(bench: Bench, stack: AsyncExitStack) -> None:
    job = make_job(budget_ms=700)
    await bench.submit(job)
    event = await bench.ended(job)
    assert event.error is not None
    assert event.error.code == "deadline_exceeded"
    assert "waiting for a worker" in event.error.message


async def test_the_standby_finishes_what_the_dead_router_accepted(
    bench: Bench, private_nats: NatsServer
) -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(running_router(private_nats.url, "router-a"))
        worker = await denoiser(stack, bench, "d1", step_s=0.4)
        jobs = [make_job() for _ in range(4)]
        for job in jobs:
            await bench.submit(job)
        await worker.news.until(lambda: bool(worker.requests))
        await stack.enter_async_context(running_router(private_nats.url, "router-b"))
        first.cancel()
        for job in jobs:
            assert (await bench.ended(job, 30)).state is JobState.COMPLETED
        records = [await bench.records.get(job.job_id) for job in jobs]
        assert all(record.failures == 0 for record in records), "the worker lived, so nothing was lost"
        assert {request.attempt for request in worker.requests} == {1}


async def test_an_end_that_is_told_again_is_kept_once(bench: Bench, stack: AsyncExitStack) -> None:
    """As by a router that was believed dead after it had written the end, and before it acknowledged the job."""
    await denoiser(stack, bench, "d1")
    job = make_job()
    await bench.submit(job)
    await bench.ended(job)
    bench.done[job.job_id] = asyncio.get_running_loop().create_future()
    await bench.bus.jetstream.publish(subjects.jobs(job.priority), codec.encode(job))
    assert (await bench.ended(job)).state is JobState.COMPLETED
    assert bench.done_count[job.job_id] == 2, "whoever missed the first hears the second"
    done = subjects.events_of_kind(EventKind.DONE)
    kept = await bench.bus.jetstream.stream_info(stores.EVENTS, subjects_filter=done)
    assert kept.state.subjects == {subjects.event(job.gateway, job.job_id, EventKind.DONE): 1}


async def test_a_full_queue_refuses_and_keeps_what_it_has(bench: Bench, private_nats: NatsServer) -> None:
    async with running_router(private_nats.url, "router-a", queue_limit=2):
        kept = [make_job(), make_job()]
        for job in kept:
            await bench.submit(job)
        with pytest.raises(QueueFull) as refused:
            await bench.submit(make_job())
        assert refused.value.retry_after_s
        async with AsyncExitStack() as stack:
            await denoiser(stack, bench, "d1")
            for job in kept:
                assert (await bench.ended(job)).state is JobState.COMPLETED
            await bench.submit(make_job())


@pytest.mark.parametrize(("limit", "full"), [(1, True), (2, False)])
async def test_the_router_tells_who_waits_for_a_worker_and_whether_more_may(
    bench: Bench, private_nats: NatsServer, limit: int, full: bool
) -> None:
    told: asyncio.Queue[ServiceState] = asyncio.Queue()
    telemetry = subjects.telemetry(ServiceName.ROUTER, "r1")
    async with (
        bench.bus.listen(telemetry, ServiceState, told.put_nowait),
        running_router(private_nats.url, "r1", max_interactive=limit),
    ):
        await bench.submit(make_job(n=3))
        async with asyncio.timeout(20):
            while (state := await told.get()).queue is None or not state.queue.jobs:
                pass
    assert state.queue == QueueState(jobs=1, rows=3, steps=3 * CARD.default_steps, full=full)
