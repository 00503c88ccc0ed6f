"""Routers when NATS goes away, when two want to lead, and when one job is beyond help: the others do not suffer."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack

import pytest
from nats.js.errors import APIError

from giornata.bus import bus as buses
from giornata.bus import streams
from giornata.bus.bus import publish_state
from giornata.bus.streams import LEASE_TTL_S
from giornata.wire import codec, subjects
from giornata.wire.errors import DeadlineExceeded
from giornata.wire.jobs import JobState, Priority
from giornata.wire.messages import CancelRows, DoneEvent, EventKind
from giornata.wire.requests import Reuse
from giornata.wire.subjects import RECORDS
from tests.fakes.nats_world.server import MemoryNatsServer
from tests.integration.nats_server import NatsServer
from tests.integration.router.bench import Bench, denoiser, make_job, running_router
from tests.unit.scheduling.test_placement import worker


@pytest.mark.real_nats
@pytest.mark.own_nats
async def test_a_restarted_nats_loses_nothing(bench: Bench, private_nats: NatsServer) -> None:
    await check_restart(bench, private_nats, 0.0)


async def test_a_nats_that_was_away_loses_no_job_no_attempt_and_no_router(
    bench: Bench, memory_nats: MemoryNatsServer
) -> None:
    await check_restart(bench, memory_nats, 60.0)


async def check_restart(bench: Bench, server: NatsServer | MemoryNatsServer, away_s: float) -> None:
    async with AsyncExitStack() as stack:
        routers = [
            await stack.enter_async_context(running_router(server.url, name, lease_s=LEASE_TTL_S))
            for name in ("r1", "r2")
        ]
        long = await denoiser(stack, bench, "d1", step_s=2 + away_s / 2)
        running = await bench.submitted()
        await long.news.until(lambda: bool(long.requests))
        server.kill()
        await asyncio.sleep(away_s)
        server.start()
        later = make_job()
        long.step_s = 0.01
        while True:
            try:
                await bench.submit(later)
            except DeadlineExceeded:
                continue
            break
        assert (await bench.ended(later)).state is JobState.COMPLETED
        record = await bench.completed(running)
        assert (record.attempt, len(record.causes)) == (1, 0), "its worker went on all the time"
        assert not any(router.done() for router in routers)


async def test_a_job_that_nobody_carries_yet_is_cancelled_at_once(bench: Bench, nats_account: str) -> None:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_router(nats_account, "r1", prepared_rows=1))
        worker = await denoiser(stack, bench, "d1", capacity=1)
        worker.going.clear()
        first, carried, second = (make_job(priority=Priority.BATCH, n=n) for n in (1, 2, 1))
        await bench.submit(first, carried, second)
        await worker.news.until(lambda: bool(worker.requests))
        await bench.cancel(second)
        await bench.bus.publish(subjects.cancel("job_unknown"), CancelRows(job_id="job_unknown", attempt=0))
        assert (await bench.ended(second)).state is JobState.CANCELLED
        assert not bench.done[first.job_id].done(), "and did not wait for the one before it"
        await bench.cancel(carried)
        worker.going.set()
        assert (await bench.ended(first)).state is JobState.COMPLETED
        assert len(worker.requests) == 1


async def test_a_job_whose_time_ends_in_the_queue_ends_there(bench: Bench, nats_account: str) -> None:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_router(nats_account, "r1", prepared_rows=1))
        first, second = make_job(), make_job(budget_ms=500)
        bench.prepost.hold = asyncio.Event()
        await bench.submit(first)
        await bench.submit(second)
        event = await bench.ended(second)
        assert event.error is not None
        assert event.error.code == "deadline_exceeded"
        assert "waiting in the queue" in event.error.message
        assert event.stage_ms.queue >= 500
        assert not bench.done[first.job_id].done()
        bench.prepost.hold.set()


async def test_workers_that_are_gone_when_asked_cost_no_attempt(bench: Bench, nats_account: str) -> None:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_router(nats_account, "r1"))
        alive = await denoiser(stack, bench, "z-alive")
        await bench.submit(warm := make_job())
        await bench.ended(warm)
        for name in (
            "a1",
            "a2",
            "a3",
            "a4",
        ):  # killed a moment ago: in the fleet still, chosen first, and not there
            await publish_state(bench.bus, worker(name))
        job = make_job(reuse=Reuse.OFF)  # otherwise its template would have a home among them
        await bench.submit(job)
        record = await bench.completed(job)
        assert (record.assignments, len(record.causes), len(alive.requests)) == ((), 0, 2)
        assert record.attempt == 5, "all four were tried before"


async def test_a_record_that_cannot_be_read_stops_no_other_job(bench: Bench, nats_account: str) -> None:
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router(nats_account, "r1"))
        await denoiser(stack, bench, "d1")
        bad, good = make_job(), make_job()
        bucket = await bench.bus.jetstream.key_value(RECORDS)
        await bucket.put(bad.job_id, b"\xc1")
        await bench.submit(bad)
        await bench.bus.jetstream.publish(subjects.jobs("batch"), b"\xc1")
        await bench.submit(good)
        assert (await bench.ended(good)).state is JobState.COMPLETED
        await bucket.delete(bad.job_id)
        assert (await bench.ended(bad)).state is JobState.COMPLETED, "it was kept, and ends once it can"
        assert not router.done()


async def test_an_ended_job_is_told_again_but_not_run_again_and_kept_once(
    bench: Bench, nats_account: str
) -> None:
    """As when a router died between the terminal record and the acknowledgement."""
    async with AsyncExitStack() as stack:
        worker = await denoiser(stack, bench, "d1")
        job = make_job()
        async with running_router(nats_account, "r1"):
            await bench.submit(job)
            await bench.ended(job)
            while True:
                info = await bench.bus.jetstream.stream_info(subjects.JOBS)
                if not info.state.messages:
                    break
                await asyncio.sleep(0.02)
        bench.done[job.job_id] = asyncio.get_running_loop().create_future()
        message = (await bench.records.get(job.job_id)).job
        await bench.bus.jetstream.publish(
            subjects.jobs(job.priority), codec.encode(message), headers={"Nats-Msg-Id": secrets.token_hex(4)}
        )
        await stack.enter_async_context(running_router(nats_account, "r2"))
        event: DoneEvent = await bench.ended(job)
        assert event.state is JobState.COMPLETED
        assert len(worker.requests) == 1
        assert bench.done_count[job.job_id] == 2, "whoever missed the first hears the second"
        done = subjects.events_of_kind(EventKind.DONE)
        kept = await bench.bus.jetstream.stream_info(subjects.EVENTS, subjects_filter=done)
        assert kept.state.subjects == {subjects.event(job.gateway, job.job_id, EventKind.DONE): 1}


async def test_the_room_in_the_stream_follows_the_configuration(nats_account: str) -> None:
    async with buses.connect(nats_account, "limits") as bus:
        for limit in (3, 7):
            await streams.ensure_queue(bus.jetstream, replicas=1, max_messages=limit)
            stream = await bus.jetstream.stream_info(subjects.JOBS)
            assert stream.config.max_msgs == limit
        for _ in range(7):
            await bus.jetstream.publish(subjects.jobs("batch"), b"")
        with pytest.raises(APIError):
            await bus.jetstream.publish(subjects.jobs("batch"), b"")
        oldest = await bus.jetstream.get_msg(subjects.JOBS, seq=1)
        assert oldest.subject == subjects.jobs("batch"), "no job is pushed out"
