"""Streams that fill up: new jobs are refused, accepted ones end, a router leads, and service comes back with room."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
from nats.js.api import StreamConfig
from nats.js.errors import APIError, ServiceUnavailableError

from giornata.bus import bus as buses
from giornata.bus import streams
from giornata.deadlines import Deadline
from giornata.wire import subjects
from giornata.wire.errors import JobNotFound, ServiceUnavailable, StoreFull
from giornata.wire.jobs import BlobRef, Job, JobState, RowState
from giornata.wire.messages import JobAck, SubmitRequest
from giornata.wire.subjects import LEASES, LEAST_STORE_BYTES, RECORDS, STORE_BYTES
from giornata.wire.values import CellMap
from giornata.wire.workers import ServiceState
from giornata_router import job_records
from giornata_router.leadership import KEY as LEASE
from tests.fakes import fleet
from tests.fakes.fleet import REF
from tests.fakes.nats_world.server import nats_world
from tests.fakes.news import News
from tests.integration.conftest import in_world
from tests.integration.nats_server import NatsServer
from tests.integration.router.bench import Bench, denoiser, make_job, open_bench, running_router
from tests.patience import HUNG_MS, HUNG_S

INSPECTION = fleet.INSPECTION.model_copy(
    update={
        "compute_set": {1: CellMap(height=64, width=64, bits=b"\xf0" + bytes(511))},
        "alpha": BlobRef(key="default/job_0123456789abcdef01234567/alpha", size_bytes=12345, sha256="0" * 64),
    }
)
"""As large as one of a real picture."""
KEYS = subjects.bucket_stream(RECORDS)


@pytest.fixture
def small_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The address of a server with room for little."""
    if in_world(request.node):
        with nats_world() as world:
            yield world.server(max_file=20_000_000).url
        return
    server = NatsServer(tmp_path, max_file="20MB")
    server.start()
    yield server.url
    server.kill()


@pytest.fixture
async def small(small_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setattr(fleet, "INSPECTION", INSPECTION)
    async with open_bench(small_url, store_bytes=LEAST_STORE_BYTES) as bench, bench.prepost.run():
        yield bench


class Leaders(News):
    """What routers tell of themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.latest: ServiceState | None = None
        """The active router's last word."""

    def hear(self, state: ServiceState) -> None:
        if state.active and state.ready and state.stores is not None:
            self.latest = state
            self.tell()

    def leads(self, name: str) -> bool:
        return self.latest is not None and self.latest.instance == name

    def knows(self, records_bytes: int) -> bool:
        """Whether the router has read that its records take so much. It reads in its own time."""
        rooms = (self.latest and self.latest.stores) or ()
        return any(room.store == KEYS and room.used_bytes >= records_bytes for room in rooms)


@asynccontextmanager
async def told(bench: Bench) -> AsyncIterator[Leaders]:
    leaders = Leaders()
    async with bench.bus.listen(subjects.telemetry_of("router"), ServiceState, leaders.hear):
        yield leaders


def wordy() -> Job:
    """A job with a prompt as long as may be."""
    job = make_job()
    return job.model_copy(update={"parameters": job.parameters.model_copy(update={"prompt": "x" * 2000})})


async def once(bench: Bench, job: Job) -> None:
    """Submit `job`; what is raised is what a client is told."""
    request = SubmitRequest(job=job, remaining_ms=job.budget_ms)
    bench.done.setdefault(job.job_id, asyncio.get_running_loop().create_future())
    await bench.bus.call(subjects.SUBMIT, request, JobAck, Deadline.after_ms(HUNG_MS))


async def filled(bench: Bench, share: float) -> int:
    """Put entries into the bucket of records, up to `share` of its limit or until it takes none; its bytes."""
    bucket = await bench.bus.jetstream.key_value(RECORDS)
    for size in (32_768, 1_024, 0):
        with suppress(APIError):
            for number in itertools.count():
                info = await bench.bus.jetstream.stream_info(KEYS)
                if info.state.bytes >= share * (info.config.max_bytes or 0):
                    return info.state.bytes
                await bucket.create(f"fill{size}-{number}", bytes(size))
    return info.state.bytes


async def submitted_for_ever(bench: Bench) -> None:
    while True:
        await once(bench, wordy())


async def published_for_ever(bench: Bench, subject: str) -> None:
    while True:
        await bench.bus.jetstream.publish(subject, bytes(200_000))


async def is_known(bench: Bench, job: Job) -> bool:
    try:
        await bench.records.get(job.job_id)
    except JobNotFound:
        return False
    return True


async def lease_holders(bench: Bench, count: int) -> list[bytes | None]:
    """The holder of the lease, and the writers of its next entries; None where it was given up."""
    watcher = await (await bench.bus.jetstream.key_value(LEASES)).watch(LEASE)
    found = list[bytes | None]()
    async with asyncio.timeout(HUNG_S):
        async for entry in watcher:
            if entry is not None:  # as the watcher is, once it has told the latest
                found.append(entry.value)
            if len(found) == count:
                break
    await watcher.stop()  # type: ignore[no-untyped-call]  # of nats-py
    return found


async def test_a_full_store_refuses_jobs_and_loses_neither_those_it_has_nor_its_router(
    small: Bench, small_url: str
) -> None:
    async with told(small) as leaders, AsyncExitStack() as stack:
        first = await stack.enter_async_context(
            running_router(small_url, "r1", store_bytes=LEAST_STORE_BYTES)
        )
        worker = await denoiser(stack, small, "d1")
        worker.going.clear()
        running = [wordy() for _ in range(20)]
        for job in running:
            await small.submit(job)
        await worker.news.until(lambda: len(worker.requests) >= 8)
        await leaders.until(lambda: leaders.leads("r1"))
        await stack.enter_async_context(running_router(small_url, "r2", store_bytes=LEAST_STORE_BYTES))

        full = await filled(small, 0.89)
        await leaders.until(lambda: leaders.knows(full * 49 // 50))
        with pytest.raises(StoreFull) as refused:
            await submitted_for_ever(small)
        assert (refused.value.code, refused.value.status) == ("store_full", 503)
        assert refused.value.retry_after_s

        worker.going.set()
        ends = [await small.ended(job) for job in running]
        assert [end.state for end in ends] == [JobState.COMPLETED] * 20, "there was room for their ends"

        await filled(small, 1.0)
        with pytest.raises(StoreFull):
            await small.records.create(job_records.accepted(wordy()))
        assert await lease_holders(small, 4) == [b"r1"] * 4, "the lease is renewed beside full records"

        first.cancel()
        await leaders.until(lambda: leaders.leads("r2"))
        with pytest.raises(StoreFull):
            await once(small, wordy())
        room = {one.store: one for one in (leaders.latest and leaders.latest.stores) or ()}
        assert room[KEYS].nearly_full
        assert not room[subjects.bucket_stream(LEASES)].nearly_full

        await small.bus.jetstream.purge_stream(KEYS)  # as when all have expired
        job = wordy()
        async with asyncio.timeout(HUNG_S):
            while True:
                try:
                    await once(small, job)
                    break
                except StoreFull:
                    await asyncio.sleep(0.2)  # the router reads the room in its own time
        assert (await small.ended(job)).state is JobState.COMPLETED


async def test_a_running_job_ends_by_its_budget_where_not_a_byte_is_left(
    small: Bench, small_url: str
) -> None:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_router(small_url, "r1", store_bytes=LEAST_STORE_BYTES))
        worker = await denoiser(stack, small, "d1")
        worker.going.clear()
        job = make_job(budget_ms=6000)
        await small.submit(job)
        await worker.news.until(lambda: bool(worker.requests))
        await filled(small, 1.0)
        event = await small.ended(job)
        assert event.error is not None
        assert event.error.code == "deadline_exceeded"
        assert (await small.records.get(job.job_id)).state is JobState.FAILED


async def test_the_record_of_an_ended_job_goes_soon_after_its_results(
    bench: Bench, nats_account: str
) -> None:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_router(nats_account, "r1", linger_s=1))
        worker = await denoiser(stack, bench, "d1")
        ended, lasting = [make_job().model_copy(update={"result_ttl_s": ttl_s}) for ttl_s in (1, 60)]
        await bench.submit(ended)
        await bench.submit(lasting)
        await bench.ended(ended)
        await bench.ended(lasting)
        worker.going.clear()
        running = make_job().model_copy(update={"result_ttl_s": 1})
        await bench.submit(running)
        async with asyncio.timeout(HUNG_S):
            while await is_known(bench, ended):  # noqa: ASYNC110 - records go without a word
                await asyncio.sleep(0.1)
        assert (await bench.records.get(lasting.job_id)).state is JobState.COMPLETED
        assert not (await bench.records.get(running.job_id)).state.terminal
        worker.going.set()
        await bench.ended(running)


@pytest.mark.real_nats
async def test_what_fills_the_servers_store_from_outside_takes_the_lease_for_no_longer_than_that(
    small: Bench, small_url: str
) -> None:
    """A stream without a limit, of somebody else, takes even the room that others reserve."""
    jetstream = small.bus.jetstream
    async with told(small) as leaders, AsyncExitStack() as stack:
        router = running_router(small_url, "r1", store_bytes=LEAST_STORE_BYTES, lease_s=streams.LEASE_TTL_S)
        await stack.enter_async_context(router)
        await denoiser(stack, small, "d1")
        await leaders.until(lambda: leaders.leads("r1"))
        await jetstream.add_stream(StreamConfig(name="foreign", subjects=["foreign"]))
        with pytest.raises(ServiceUnavailableError):
            await published_for_ever(small, "foreign")
        with pytest.raises(ServiceUnavailable):
            await once(small, make_job())
        await asyncio.sleep(1.5 * streams.LEASE_TTL_S)
        await jetstream.purge_stream("foreign")
        job = make_job()
        await small.submit(job)
        assert (await small.ended(job)).state is JobState.COMPLETED


async def test_streams_of_earlier_versions_are_limited_by_the_next_router(nats_account: str) -> None:
    async with buses.connect(nats_account, "limits") as bus:
        jetstream = bus.jetstream
        await streams.ensure(jetstream, replicas=1, events_ttl_s=60)
        for name in subjects.STREAMS:
            config = (await jetstream.stream_info(name)).config
            await jetstream.update_stream(config.evolve(max_bytes=-1))
        ttl_s = streams.records_ttl_s(7 * 86400, 600)
        await streams.update(jetstream, replicas=1, store_bytes=STORE_BYTES, records_ttl_s=ttl_s)
        await streams.ensure_queue(jetstream, replicas=1, max_messages=10)
        found = {
            name: (await jetstream.stream_info(name)).config for name in (subjects.JOBS, *subjects.STREAMS)
        }
        assert {name: config.max_bytes for name, config in found.items()} == subjects.limits(STORE_BYTES)
        assert found[KEYS].max_age == 7 * 86400 + 600
        assert found[KEYS].allow_msg_ttl


async def test_a_server_without_room_for_all_streams_is_told_at_the_start(small: Bench) -> None:
    with pytest.raises(ServiceUnavailable, match=r"GIORNATA_JOBS.*GIORNATA_NATS_STORE_BYTES"):
        await streams.ensure_queue(
            small.bus.jetstream, replicas=1, max_messages=10, store_bytes=20 * LEAST_STORE_BYTES
        )


async def test_a_full_bucket_takes_the_end_of_a_job_and_no_other_revision(small: Bench) -> None:
    """The rule of the server that the limit's headroom and lean ends rest on."""
    job = make_job(n=2)
    record = job_records.accepted(job)
    await small.records.create(record)
    times = job_records.JobTimes(record.stage_ms, record.compute_ms, 5)
    rows = tuple(
        row.model_copy(update={"latents": REF, "resume": RowState(step=1, latents=REF)})
        for row in record.rows
    )
    running = record.model_copy(update={"state": JobState.RUNNING, "inspection": INSPECTION, "rows": rows})
    await small.records.change(job.job_id, lambda _: running)
    await filled(small, 1.0)
    with pytest.raises(APIError):
        await small.records.change(job.job_id, lambda r: job_records.entered(r, JobState.FINISHING, times))
    imaged = tuple(row.model_copy(update={"image": REF}) for row in rows)
    await small.records.change(job.job_id, lambda r: job_records.ended(r, imaged, times))
    assert (await small.records.get(job.job_id)).state is JobState.COMPLETED
