"""How often a walk uses its record, and that a router of this version loses nothing of what the next one writes."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from giornata.bus import bus, streams
from giornata.deadlines import Deadline
from giornata.records import Change, JobRecordStore, RecordRevision
from giornata.wire import codec, subjects
from giornata.wire.errors import JobNotFound
from giornata.wire.jobs import Job, JobRecord, JobState
from giornata_gateway.jobs.submission import JobLedger
from giornata_router import job_records
from giornata_router.job_records import accepted
from tests.contract.versions import LATER, next_version, parts, sown
from tests.fakes.denoiser import FakeDenoiser
from tests.integration.router.bench import Bench, denoiser, make_job, running_router
from tests.patience import HUNG_MS
from tests.present import present

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
        first = await bench.submitted()
        await bench.ended(first)
        USES.clear()
        jobs = [make_job() for _ in range(4)]
        await bench.submit(*jobs)
        assert {(await bench.ended(job)).state for job in jobs} == {JobState.COMPLETED}
        assert USES["create"] == len(jobs)
        assert USES["write"] <= 2 * len(jobs)
        assert USES["read"] <= len(jobs)


async def test_a_state_that_lasts_is_in_the_record(bench: Bench, nats_account: str) -> None:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_router(nats_account, "r1"))
        await denoiser(stack, bench, "d1")
        bench.prepost.hold = asyncio.Event()
        job = await bench.submitted()
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
    revision = present(await bench.records.create(accepted))
    await bench.records.change(job.job_id, lambda record: record.model_copy(update={"cancel": True}))
    ended = await bench.records.revise(
        job.job_id,
        lambda record: record.model_copy(update={"state": JobState.CANCELLED}),
        RecordRevision(accepted, revision),
    )
    assert (ended.record.state, ended.record.cancel) == (JobState.CANCELLED, True)


Next = next_version(JobRecord)


class NextRecords(JobRecordStore):
    """The records as the next version changes them: it fills its new field in every part."""

    async def change(self, key: str, change: Change[JobRecord]) -> JobRecord:
        def marked(record: JobRecord) -> JobRecord | None:
            following = change(record)
            return following and sown(following, lambda _: {LATER: "denoiser"})

        return await super().change(key, marked)


async def test_what_the_next_version_writes_outlives_this_ones_changes(
    bench: Bench, stack: AsyncExitStack
) -> None:
    later = replace(bench.records, kind=Next)
    records = NextRecords(**vars(later))
    worker = FakeDenoiser(bench.bus, records, "d1", step_s=0.05)
    await stack.enter_async_context(worker.run())
    job = sown(make_job(n=2), lambda _: {LATER: "gateway"})
    await bench.submit(job)
    assert (await bench.ended(job)).state is JobState.COMPLETED
    sent: Job = worker.requests[0].job
    assert {part.model_extra[LATER] for _, part in parts(sent) if part.model_extra} == {"gateway"}
    entry = await bench.records.bucket.get(job.job_id)
    record = codec.decode(Next, present(entry.value))
    marks = {path: getattr(part, LATER) for path, part in parts(record)}
    written_after = {path for path in marks if path[-1:] == ("image",) and path[0] == "rows"}
    assert {path for path, mark in marks.items() if mark != "denoiser"} == written_after
    assert {("job", "parameters"), ("rows", 1), ("inspection", "prepared"), ("stage_ms",)} <= set(marks)


# The job records of a gateway that is there before any router.


@pytest.mark.world
async def test_a_gateway_knows_no_job_until_a_router_has_made_the_bucket_or_made_it_again(
    nats_account: str,
) -> None:
    record = accepted(make_job())
    job_id = record.job.job_id
    async with bus.connect(nats_account, "g") as connected:
        jetstream = connected.jetstream
        records = JobLedger(connected)
        with pytest.raises(JobNotFound):
            await records.get(job_id)
        for _ in range(2):
            await streams.ensure(jetstream, replicas=1, events_ttl_s=60)
            await (await JobRecordStore.open(jetstream)).create(record)
            assert (await records.get(job_id)).job == record.job
            assert (await records.change(job_id, lambda one: one.model_copy(update={"cancel": True}))).cancel
            await jetstream.delete_key_value(subjects.RECORDS)
            with pytest.raises(JobNotFound):
                await records.change(job_id, lambda one: one)
