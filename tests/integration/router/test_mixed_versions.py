"""A router of this version and workers of the next one carry a job together, and lose nothing of its record."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace

from giornata.records import Change, JobRecordStore
from giornata.wire import codec
from giornata.wire.jobs import Job, JobRecord, JobState
from giornata.wire.subjects import RECORDS
from tests.contract.versions import LATER, next_version, parts, sown
from tests.fakes.denoiser import FakeDenoiser
from tests.integration.router.bench import Bench, make_job

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
    assert entry.value is not None
    record = codec.decode(Next, entry.value)
    marks = {path: getattr(part, LATER) for path, part in parts(record)}
    written_after = {path for path in marks if path[-1:] == ("image",) and path[0] == "rows"}
    assert {path for path, mark in marks.items() if mark != "denoiser"} == written_after
    assert {("job", "parameters"), ("rows", 1), ("inspection", "prepared"), ("stage_ms",)} <= set(marks)


async def test_versions_change_a_record_in_turns(bench: Bench) -> None:
    ours, theirs = bench.records, replace(bench.records, kind=Next)
    assert ours.name == RECORDS
    job = sown(make_job(n=2), lambda _: {LATER: "0"})
    await ours.create(JobRecord(job=job))
    for turn in range(1, 4):
        mark = str(turn)
        await theirs.change(job.job_id, lambda record, mark=mark: sown(record, lambda _: {LATER: mark}))  # type: ignore[misc]  # bound per turn
        await ours.change(
            job.job_id, lambda record: record.model_copy(update={"attempt": record.attempt + 1})
        )
        record = await theirs.get(job.job_id)
        assert record.attempt == turn
        assert {getattr(part, LATER) for _, part in parts(record)} == {mark}
