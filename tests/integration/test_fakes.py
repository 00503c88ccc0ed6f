"""What tests rely on that have an account of a NATS server instead of a server, or a scripted router."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nats
import pytest

from giornata.bus import bus as buses
from giornata.bus import streams
from giornata.deadlines import Deadline
from giornata.records import JobRecordStore
from giornata.wire import subjects
from giornata.wire.errors import DeadlineExceeded
from giornata.wire.jobs import JobRecord, JobState
from giornata.wire.messages import JobAck, SubmitRequest
from tests.fakes.blobs import MemoryBlobs
from tests.integration.fake_router import FakeRouter
from tests.integration.nats_accounts import LeakedConnection, NatsAccounts
from tests.integration.router.bench import make_job


@contextmanager
def opened(folder: Path, count: int, **options: float) -> Iterator[NatsAccounts]:
    accounts = NatsAccounts(folder, count, **options)
    try:
        yield accounts
    finally:
        accounts.close()


async def test_accounts_share_neither_subjects_nor_streams(tmp_path: Path) -> None:
    with opened(tmp_path, 2) as accounts, accounts.lent() as one, accounts.lent() as other:
        async with await nats.connect(one) as first, await nats.connect(other) as second:
            for client in (first, second):
                stream = await client.jetstream().add_stream(name="jobs", subjects=["jobs"], max_msgs=1)
                assert stream.state.messages == 0
            heard = await second.subscribe("*")
            await second.flush()
            await first.jetstream().publish("jobs", b"mine")
            await second.jetstream().publish("jobs", b"yours")
            assert (await heard.next_msg()).data == b"yours"
            assert (await first.jetstream().get_msg("jobs", 1)).data == b"mine"


async def test_an_account_that_comes_back_is_empty(tmp_path: Path) -> None:
    with opened(tmp_path, 1) as accounts:
        for _ in range(2):
            with accounts.lent() as url:
                async with await nats.connect(url) as client:
                    assert await client.jetstream().streams_info() == []
                    await client.jetstream().create_key_value(bucket="records")


async def test_a_connection_that_is_left_open_is_told_by_its_name_and_its_account_is_not_lent_again(
    tmp_path: Path,
) -> None:
    with opened(tmp_path, 1, wait_s=0.1) as accounts:
        with pytest.raises(LeakedConnection, match="a router"), accounts.lent() as url:
            client = await nats.connect(url, name="a router")
        with pytest.raises(IndexError), accounts.lent():
            pass
        await client.close()


# The scripted router behind the gateway keeps its word as a real one: what it accepts ends.


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
