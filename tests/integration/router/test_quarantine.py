"""A job that was given up is kept for an operator, at any moment at which the connection to NATS breaks."""

from __future__ import annotations

import nats.errors
import pytest

from giornata.records import Change, JobRecordStore, Quarantine, RecordRevision
from giornata.wire.errors import AttemptsExhausted
from giornata.wire.jobs import JobRecord, JobState
from giornata_router import job_records
from tests.integration.router.bench import Bench, make_job, running_router

CAUSES = (
    "attempt 1 on d1: it fell silent",
    "attempt 2 on d2: it fell silent",
    "attempt 3 on d3: it fell silent",
)


def _ends(change: Change[JobRecord], record: JobRecord) -> bool:
    following = change(record)
    return following is not None and following.state.terminal


@pytest.mark.parametrize("broken", ["before the quarantine", "before the terminal record"])
async def test_a_job_is_in_quarantine_though_the_connection_breaks(
    bench: Bench, nats_account: str, broken: str
) -> None:
    breaks = [broken]

    def break_once(where: str) -> None:
        if where in breaks:
            breaks.remove(where)
            raise nats.errors.TimeoutError

    class UnsteadyQuarantine(Quarantine):
        async def put(self, record: JobRecord) -> int:
            break_once("before the quarantine")
            return await super().put(record)

    class UnsteadyRecords(JobRecordStore):
        async def revise(
            self, key: str, change: Change[JobRecord], known: RecordRevision[JobRecord] | None = None
        ) -> RecordRevision[JobRecord]:
            if _ends(change, await self.get(key)):
                break_once("before the terminal record")
            return await super().revise(key, change, known)

    job = make_job()
    record = job_records.accepted(job)
    lost = tuple(row.model_copy(update={"failures": 3, "attempt": 3}) for row in record.rows)
    await bench.records.create(record.model_copy(update={"rows": lost, "attempt": 3, "causes": CAUSES}))
    async with running_router(
        nats_account, "router-a", records_of=UnsteadyRecords, quarantine_of=UnsteadyQuarantine
    ):
        await bench.submit(job)
        event = await bench.ended(job)
    assert not breaks, "the connection broke"
    assert event.error is not None
    assert event.error.code == AttemptsExhausted.code
    kept = await (await Quarantine.open(bench.bus.jetstream)).get(job.job_id)
    assert (kept.state, kept.causes, kept.error) == (JobState.FAILED, CAUSES, event.error)
    assert bench.done_count[job.job_id] == 1
