"""Hundreds of queued jobs: whose turn it is, what is refused, and who takes them over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, aclosing, suppress

import nats.errors
import pytest
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig

from giornata.bus import streams
from giornata.bus.bus import Bus
from giornata.records import Quarantine
from giornata.wire import codec, subjects
from giornata.wire.errors import BatchQueueFull, TenantQueueFull
from giornata.wire.jobs import Job, JobState, Priority
from giornata.wire.messages import Epoch
from giornata.wire.subjects import RECORDS
from giornata.wire.workers import QueueState, ServiceName, ServiceState
from giornata_router import job_queue as router_queue
from giornata_router.dispatch import RouterContext
from giornata_router.job_queue import LaterLeaderError, QueueConsumer
from giornata_router.job_runner import HeldJob
from tests.integration.router.bench import Bench, denoiser, make_job, running_router
from tests.patience import HUNG_S

SMALL = 4
"""Rows of a small window, with no or one small worker."""


async def queued(bench: Bench, jobs: Sequence[Job]) -> None:
    """Put jobs into the work queue, as routers did that are gone."""
    await streams.ensure_queue(bench.bus.jetstream, replicas=1, max_messages=100_000)
    loop = asyncio.get_running_loop()
    for first in range(0, len(jobs), 100):
        some = jobs[first : first + 100]
        for job in some:
            bench.done.setdefault(job.job_id, loop.create_future())
        publish = bench.bus.jetstream.publish
        await asyncio.gather(
            *(
                publish(subjects.jobs(job.priority), codec.encode(job), headers={"Nats-Msg-Id": job.job_id})
                for job in some
            )
        )


async def told(bench: Bench, router: str, holds: Callable[[QueueState], bool]) -> QueueState:
    """The queue's state once `holds` of it; a router that takes the queue over is given its jobs one by one."""
    states: asyncio.Queue[ServiceState] = asyncio.Queue()
    subject = subjects.telemetry(ServiceName.ROUTER, router)
    async with bench.bus.listen(subject, ServiceState, states.put_nowait), asyncio.timeout(HUNG_S):
        while (state := await states.get()).queue is None or not holds(state.queue):
            pass
    return state.queue


async def left(bench: Bench) -> int:
    """Messages in the work queue."""
    return (await bench.bus.jetstream.stream_info(subjects.JOBS)).state.messages


def ended(bench: Bench, jobs: Sequence[Job]) -> int:
    return sum(bench.done[job.job_id].done() for job in jobs)


async def test_an_interactive_edit_passes_a_flood_of_batch_jobs_and_is_not_refused(
    bench: Bench, nats_account: str
) -> None:
    flood = [make_job(priority=Priority.BATCH, budget_ms=600_000) for _ in range(200)]
    async with AsyncExitStack() as stack:
        await queued(bench, flood)
        await stack.enter_async_context(
            running_router(nats_account, "r1", queue_limit=200, prepared_rows=SMALL)
        )
        await told(bench, "r1", lambda queue: queue.full and queue.jobs > 150)
        with pytest.raises(BatchQueueFull):
            await bench.submit(make_job(priority=Priority.BATCH))
        await denoiser(stack, bench, "d1", capacity=2)
        await bench.submit(edit := make_job())
        await bench.ended(edit)
        assert ended(bench, flood) < 50


async def test_one_tenant_is_refused_before_it_has_all_places(bench: Bench, nats_account: str) -> None:
    async with running_router(nats_account, "r1", queue_limit=4, tenant_share=0.5):
        for _ in range(2):
            await bench.submit(make_job(tenant="many"))
        with pytest.raises(TenantQueueFull) as refused:
            await bench.submit(make_job(tenant="many"))
        assert refused.value.accepted == "at most 2 of 4"
        await bench.submit(make_job(tenant="many", priority=Priority.BATCH))
        await bench.submit(make_job(tenant="few"))


async def test_queued_jobs_are_taken_over_at_once_and_each_ends_once(bench: Bench, nats_account: str) -> None:
    count = 60
    jobs = [make_job(budget_ms=600_000, tenant=f"t{i % 3}") for i in range(count)]
    async with AsyncExitStack() as stack:
        await queued(bench, jobs)
        first = await stack.enter_async_context(running_router(nats_account, "r1", queue_limit=count))
        slow = await denoiser(stack, bench, "d1", capacity=8)
        slow.going.clear()
        await slow.news.until(lambda: len(slow.requests) >= 8)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await stack.enter_async_context(running_router(nats_account, "r2", queue_limit=count))
        await told(bench, "r2", lambda queue: queue.full and queue.jobs >= count - 40)
        slow.going.set()
        await denoiser(stack, bench, "d2", capacity=32, step_s=0.0)
        await asyncio.wait_for(asyncio.gather(*(bench.done[job.job_id] for job in jobs)), HUNG_S)
        records = [await bench.records.get(job.job_id) for job in jobs]
        # An attempt that a worker was not asked for, since NATS answered too late, has a number and no cause.
        assert {(r.state, len(r.causes)) for r in records} == {(JobState.COMPLETED, 0)}
        async with asyncio.timeout(HUNG_S):
            while await left(bench):  # noqa: ASYNC110 - the last acknowledgements tell nobody
                await asyncio.sleep(0.1)


async def test_a_message_that_cannot_be_read_waits_aside_for_a_router_that_can(
    bench: Bench, nats_account: str
) -> None:
    async with AsyncExitStack() as stack:
        await queued(bench, [])
        newer = b"\x81\xa6schema\x63"
        await bench.bus.jetstream.publish(subjects.jobs(Priority.BATCH), newer)
        await stack.enter_async_context(running_router(nats_account, "r1", queue_limit=1, prepared_rows=1))
        await denoiser(stack, bench, "d1")
        assert (await told(bench, "r1", lambda queue: queue.unreadable > 0)).unreadable == 1
        await bench.submit(job := make_job(priority=Priority.BATCH))
        assert (await bench.ended(job)).state is JobState.COMPLETED, "it takes no place"
        assert await left(bench) >= 1, "and is kept"


async def test_a_job_with_a_record_that_cannot_be_read_ends_when_its_time_is_over(
    bench: Bench, nats_account: str
) -> None:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_router(nats_account, "r1"))
        job = make_job(budget_ms=1500)
        bucket = await bench.bus.jetstream.key_value(RECORDS)
        await bucket.put(job.job_id, b"\xc1")
        await bench.submit(job)
        event = await bench.ended(job)
        assert event.error is not None
        assert (event.state, event.error.code) == (JobState.FAILED, "schema_mismatch")
        quarantine = await Quarantine.open(bench.bus.jetstream)
        assert (await quarantine.get(job.job_id)).state is JobState.FAILED
        async with asyncio.timeout(HUNG_S):
            while await left(bench):  # noqa: ASYNC110 - the acknowledgement tells nobody
                await asyncio.sleep(0.1)


async def received(consumer: QueueConsumer, number: int) -> list[Msg]:
    found: list[Msg] = []
    async with asyncio.timeout(HUNG_S), aclosing(consumer.messages()) as messages:
        async for message in messages:
            found.append(message)
            if len(found) == number:
                break
    return found


def consumer_of(bus: Bus, epoch: int) -> QueueConsumer:
    return QueueConsumer(bus, Priority.BATCH, Epoch(1, epoch))


async def test_the_queue_belongs_to_the_latest_leader(bench: Bench) -> None:
    jobs = [make_job(priority=Priority.BATCH) for _ in range(300)]
    await queued(bench, jobs)
    before = ConsumerConfig(  # made by a version without epochs
        durable_name="router-batch",
        filter_subject=subjects.jobs(Priority.BATCH),
        ack_policy=AckPolicy.EXPLICIT,
    )
    await bench.bus.jetstream.add_consumer(subjects.JOBS, before)
    first, second = consumer_of(bench.bus, 9), consumer_of(bench.bus, 10)
    assert await first.begin() == 300
    held = await received(first, 300)
    assert await second.begin() == 300, "everything unacknowledged comes again"
    with pytest.raises(LaterLeaderError):
        await first.begin()
    with pytest.raises(nats.errors.Error):
        await held[0].ack_sync()
    await held[1].nak()
    assert len(await received(second, 300)) == 300
    assert await second.delivered() == (300, 300)
    assert await left(bench) == 300, "an earlier leader takes nothing out any more"
    with pytest.raises(nats.errors.Error):
        await received(first, 1)
    await first.end()
    assert await second.delivered() == (300, 300)


async def test_what_was_lost_on_its_way_comes_again_and_what_is_acknowledged_does_not(bench: Bench) -> None:
    jobs = [make_job(priority=Priority.BATCH) for _ in range(3)]
    await queued(bench, jobs)
    consumer = consumer_of(bench.bus, 1)
    await consumer.begin()
    messages = await received(consumer, 3)
    await messages[0].ack_sync()
    assert await consumer.begin() == 2
    again = await received(consumer, 2)
    assert [message.data for message in again] == [message.data for message in messages[1:]]
    for message in again:
        await message.ack_sync()
    assert await left(bench) == 0


@pytest.mark.parametrize("ended", [True, False])
async def test_a_walk_that_swallows_its_cancellation_begins_no_other(
    bench: Bench, nats_account: str, monkeypatch: pytest.MonkeyPatch, *, ended: bool
) -> None:
    """As wait_for of Python 3.11 may: the router that steps down is in order, and leaves the next job to another."""
    carried: asyncio.Queue[str] = asyncio.Queue()

    async def stubborn(_tools: RouterContext, held: HeldJob) -> bool:
        carried.put_nowait(held.job.job_id)
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return ended

    monkeypatch.setattr(router_queue, "carry", stubborn)
    jobs = [make_job() for _ in range(3)]
    async with running_router(nats_account, "r1", prepared_rows=1) as router:
        await bench.submit(*jobs)
        assert await asyncio.wait_for(carried.get(), HUNG_S) == jobs[0].job_id
    assert router.exception() is None
    assert carried.empty()
    assert await left(bench) == len(jobs)
