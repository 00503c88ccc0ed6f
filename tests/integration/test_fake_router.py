"""The scripted router behind the gateway keeps its word as a real one: what it accepts ends."""

from __future__ import annotations

import asyncio

import pytest

from giornata.blobs import MemoryBlobs
from giornata.bus import bus as buses
from giornata.bus import streams
from giornata.deadlines import Deadline
from giornata.records import JobRecordStore
from giornata.wire import subjects
from giornata.wire.errors import DeadlineExceeded
from giornata.wire.jobs import JobRecord, JobState
from giornata.wire.messages import JobAck, SubmitRequest
from tests.integration.fake_router import FakeRouter
from tests.integration.router.bench import make_job

TRY_MS = 2000


@pytest.mark.world
async def test_a_job_ends_though_the_time_of_a_try_ended_as_its_record_was_written(
    nats_account: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, job, tries = JobRecordStore.create, make_job(), 0

    async def create_late(records: JobRecordStore, record: JobRecord) -> int | None:
        nonlocal tries
        tries += 1
        made = await create(records, record)
        if tries == 1:
            await asyncio.sleep(2 * TRY_MS / 1000)
        return made

    monkeypatch.setattr(JobRecordStore, "create", create_late)
    async with buses.connect(nats_account, "router") as bus, buses.connect(nats_account, "gateway") as asker:
        await streams.ensure(bus.jetstream, replicas=1, events_ttl_s=60)
        records = await JobRecordStore.open(bus.jetstream)
        router = FakeRouter(bus, MemoryBlobs(), records)

        async def submit() -> None:
            request = SubmitRequest(job=job, remaining_ms=TRY_MS)
            await asker.call(subjects.SUBMIT, request, JobAck, Deadline.after_ms(TRY_MS))

        async with router.running():
            with pytest.raises(DeadlineExceeded):
                await submit()
            await submit()
            await asyncio.wait_for(router.ended.wait(), 60)
            assert (await router.records.get(job.job_id)).state is JobState.COMPLETED
            await submit()
            assert len(router.jobs) == 1
            assert not router.running_jobs
