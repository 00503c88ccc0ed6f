"""A cluster of three NATS servers: one dies, the leader too, and nothing that was accepted is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import nats.errors
import pytest
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_fixed

from giornata.bus import bus as buses
from giornata.bus import streams
from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.records import JobRecordStore
from giornata.wire import subjects
from giornata.wire.errors import DeadlineExceeded, JobNotFound, ServiceUnavailable
from giornata.wire.jobs import Job, JobRecord, JobState, Priority
from giornata.wire.messages import DoneEvent, Epoch, EventKind, JobAck, SubmitRequest
from giornata.wire.subjects import NatsRole
from giornata_router import job_records
from giornata_router.job_queue import QueueConsumer
from tests.fakes.denoiser import FakeDenoiser
from tests.fakes.fleet import FakePrepost
from tests.integration.nats_cluster import NatsCluster, nats_cluster
from tests.integration.router.bench import Bench, make_job, running_router
from tests.patience import HUNG_S

pytestmark = pytest.mark.slow

LEADERLESS_S = 40
"""A server that is missed is replaced as leader within ten seconds; machines may be busy."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[NatsCluster]:
    with nats_cluster(tmp_path) as started:
        yield started


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as opened:
        yield opened


async def connected(stack: AsyncExitStack, cluster: NatsCluster, user: NatsRole) -> Bus:
    return await stack.enter_async_context(
        buses.connect(cluster.url, f"test-{user}", user=user, password_file=cluster.password_file(user))
    )


def insisting(*more: type[Exception]) -> AsyncRetrying:
    """Again while there is no leader, as services do; or while what is asserted does not hold."""
    return AsyncRetrying(
        retry=retry_if_exception_type((nats.errors.Error, ServiceUnavailable, DeadlineExceeded, *more)),
        stop=stop_after_delay(4 * LEADERLESS_S),  # tests share their machine
        wait=wait_fixed(0.2),
        reraise=True,
    )


async def accept(bus: Bus, records: JobRecordStore, job: Job) -> JobRecord:
    """What a router does before it says that a job is accepted."""
    async for attempt in insisting():
        with attempt:
            await bus.jetstream.publish(
                subjects.jobs(job.priority),
                job.job_id.encode(),
                timeout=1,
                headers={"Nats-Msg-Id": job.job_id},
            )
    record = job_records.accepted(job)
    async for attempt in insisting():
        with attempt:
            await records.create(record)  # of a try that failed it may be there
    return record


async def kept(bus: Bus, records: JobRecordStore, accepted: list[JobRecord]) -> None:
    """Every accepted job is in the queue once, and has its record; a new leader may have to take them up first."""
    async for attempt in insisting(AssertionError, JobNotFound):
        with attempt:
            info = await bus.jetstream.stream_info(subjects.JOBS)
            assert info.state.messages == len(accepted)
    for record in accepted:
        async for attempt in insisting(AssertionError, JobNotFound):
            with attempt:
                assert await records.get(record.job.job_id) == record
    consumer = QueueConsumer(bus, Priority.INTERACTIVE, Epoch(1, 1))
    told: set[str] = set()
    async for attempt in insisting(TimeoutError):
        with attempt:
            await consumer.begin()
            async with asyncio.timeout(5), aclosing(consumer.messages()) as messages:
                async for message in messages:
                    told.add(message.data.decode())
                    if len(told) == len(accepted):
                        break
    assert told == {record.job.job_id for record in accepted}


async def test_what_was_begun_on_one_server_goes_on_with_three_and_a_record_is_made_once(
    cluster: NatsCluster, stack: AsyncExitStack
) -> None:
    bus, other = [await connected(stack, cluster, NatsRole.ROUTER) for _ in range(2)]
    await streams.ensure(bus.jetstream, replicas=1, events_ttl_s=60)
    older = (await bus.jetstream.stream_info(subjects.EVENTS)).config.evolve(subjects=[subjects.ALL_EVENTS])
    await bus.jetstream.update_stream(older)
    await streams.ensure_queue(bus.jetstream, replicas=1, max_messages=1000)
    records = await JobRecordStore.open(bus.jetstream)
    accepted = [await accept(bus, records, make_job())]
    for replicas in (3, 1):  # who comes later with fewer takes nothing away
        await streams.update(
            bus.jetstream, replicas=replicas, store_bytes=subjects.STORE_BYTES, records_ttl_s=24 * 3600
        )
        for name in ("KV_giornata-jobs", "KV_giornata-templates", "KV_giornata-leases", subjects.EVENTS):
            async for attempt in insisting():
                with attempt:
                    info = await bus.jetstream.stream_info(name)
                    assert info.config.num_replicas == 3
    kept_events = (await bus.jetstream.stream_info(subjects.EVENTS)).config.subjects
    assert kept_events == list(streams.KEPT_EVENTS), "an older version kept steps, too"
    await streams.ensure_queue(bus.jetstream, replicas=3, max_messages=1000)
    await kept(bus, records, accepted)

    # A router that accepts a job and one that carries it create its record at once; one is told that it was first.
    others = await JobRecordStore.open(other.jetstream)
    drafts = [job_records.accepted(make_job()) for _ in range(120)]
    for first in range(0, len(drafts), 20):  # in one of forty the second writer finds no record to read
        some = drafts[first : first + 20]
        pairs = [asyncio.gather(records.create(one), others.create(one)) for one in some]
        for created in await asyncio.gather(*pairs):
            assert sorted(revision is not None for revision in created) == [False, True]


class Insisting(Bench):
    """Sees what the gateway sees: events, and the record where an event was missed."""

    async def submit(self, *jobs: Job) -> None:
        for job in jobs:
            self.done.setdefault(job.job_id, asyncio.get_running_loop().create_future())
            request = SubmitRequest(job=job, remaining_ms=2000)
            async for attempt in insisting():
                with attempt:
                    await self.bus.call(subjects.SUBMIT, request, JobAck, Deadline.after_ms(2000))

    async def end(self, job: Job) -> JobRecord:
        """The terminal record; its event may have gone with a connection."""
        async with asyncio.timeout(HUNG_S):
            while True:
                await asyncio.wait([self.done[job.job_id]], timeout=3)
                async for attempt in insisting():
                    with attempt:
                        record = await self.records.get(job.job_id)
                if record.state.terminal:
                    return record


async def test_every_accepted_job_ends_though_each_server_and_then_all_die_under_the_router(
    cluster: NatsCluster, stack: AsyncExitStack
) -> None:
    gateway, prepost, denoiser = [
        await connected(stack, cluster, user)
        for user in (NatsRole.GATEWAY, NatsRole.PREPOST, NatsRole.DENOISER)
    ]
    onlooker = await connected(stack, cluster, NatsRole.ROUTER)
    await streams.ensure(onlooker.jetstream, replicas=3, events_ttl_s=60)
    bench = Insisting(gateway, await JobRecordStore.open(gateway.jetstream), FakePrepost(prepost))
    done = subjects.events_of_gateway("gateway-test", EventKind.DONE)
    await stack.enter_async_context(gateway.listen(done, DoneEvent, bench.hear))
    await stack.enter_async_context(bench.prepost.run())
    workers = [
        FakeDenoiser(denoiser, await JobRecordStore.open(denoiser.jetstream), name, step_s=0.5)
        for name in ("d1", "d2")
    ]
    routers = []
    for name in ("r1", "r2"):
        password_file = cluster.password_file(NatsRole.ROUTER)
        router = running_router(
            cluster.url, name, replicas=3, password_file=password_file, lease_s=streams.LEASE_TTL_S
        )
        routers.append(await stack.enter_async_context(router))
    for worker in workers:
        await stack.enter_async_context(worker.run())

    jobs: list[Job] = []

    async def hand_in(n: int) -> None:
        for job in [make_job() for _ in range(n)]:
            await bench.submit(job)
            jobs.append(job)

    for stream in (subjects.JOBS, "KV_giornata-jobs"):
        await hand_in(4)  # what the first server has taken up since it died counts when the second dies
        server = cluster.servers[await cluster.leader(onlooker.jetstream, stream)]
        server.kill()
        await hand_in(1)
        server.start()
    await hand_in(1)
    for server in cluster.servers.values():
        server.kill()
    for server in cluster.servers.values():
        server.start()
    for job in jobs:
        record = await bench.end(job)
        assert (record.state, record.error) == (JobState.COMPLETED, None)
    assert not any(router.done() for router in routers)
