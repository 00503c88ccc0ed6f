"""How often a walk uses its record: it writes what a successor goes on from, and reads what others have written."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from contextlib import AsyncExitStack

import pytest

from giornata.deadlines import Deadline
from giornata.records import JobRecordStore, RecordRevision
from giornata.wire.jobs import JobRecord, JobState
from giornata_router import job_records
from tests.integration.router.bench import Bench, denoiser, make_job, running_router
from tests.patience import HUNG_MS

USES = Counter[str]()
"""How often the router has read and written records, by what it did."""


class CountedRecords(JobRecordStore):
    """Counts every question to the bucket, except those of watchers."""

    async def read(self, key: str) -> RecordRevision[JobRecord]:
        USES["read"] += 1
        return await super().read(key)

    async def create(self, record: JobRecord) -> int | None:
        USES["create"] += 1
        return await super().create(record)

    async def _write(self, key: str, record: JobRecord, revision: int) -> int:
        USES["write"] += 1
        return await super()._write(key, record, revision)


async def test_an_undisturbed_walk_reads_its_record_once(
    bench: Bench, nats_account: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_records, "UNWRITTEN_S", math.inf)  # no state lasts, however slow the machine is
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_router(nats_account, "r1", records_of=CountedRecords))
        await denoiser(stack, bench, "d1")
        first = make_job()
        await bench.submit(first)
        await bench.ended(first)
        USES.clear()
        jobs = [make_job() for _ in range(4)]
        for job in jobs:
            await bench.submit(job)
        assert {(await bench.ended(job)).state for job in jobs} == {JobState.COMPLETED}
        assert USES["create"] == len(jobs)
        assert USES["write"] <= 2 * len(jobs)
        assert USES["read"] <= len(jobs)


async def test_a_state_that_lasts_is_in_the_record(bench: Bench, nats_account: str) -> None:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_router(nats_account, "r1"))
        await denoiser(stack, bench, "d1")
        bench.prepost.hold = asyncio.Event()
        job = make_job()
        await bench.submit(job)
        found = await bench.records.until(
            job.job_id, lambda record: record.state is JobState.PREPARING, Deadline.after_ms(HUNG_MS)
        )
        assert found.state is JobState.PREPARING
        bench.prepost.hold.set()
        assert (await bench.ended(job)).state is JobState.COMPLETED


async def test_an_end_is_written_over_no_change_that_its_writer_does_not_know(bench: Bench) -> None:
    """It has a life of its own, and so is written in another way than other changes."""
    job = make_job()
    accepted = job_records.accepted(job)
    revision = await bench.records.create(accepted)
    assert revision is not None
    await bench.records.change(job.job_id, lambda record: record.model_copy(update={"cancel": True}))
    ended = await bench.records.revise(
        job.job_id,
        lambda record: record.model_copy(update={"state": JobState.CANCELLED}),
        RecordRevision(accepted, revision),
    )
    assert (ended.record.state, ended.record.cancel) == (JobState.CANCELLED, True)
