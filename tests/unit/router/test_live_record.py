"""A job's record as its walk knows it: a cancellation on the way is not lost with the answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import pytest

from giornata.records import Change, RecordRevision
from giornata.wire.errors import JobCancelled
from giornata.wire.jobs import JobRecord, JobState
from giornata.wire.messages import StateEvent
from giornata_router import job_records
from giornata_router.job_records import UNWRITTEN_S, LiveJobRecord
from tests.contract.messages import JOB

KNOWN = RecordRevision(job_records.accepted(JOB), 1)


class SwallowingRecords:
    """Answers once asked to stop, as Python 3.11's wait_for does where both come at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def read(self, job_id: str) -> RecordRevision[JobRecord]:
        assert job_id == JOB.job_id
        self.asked.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return KNOWN

    async def revise(
        self, job_id: str, _: Change[JobRecord], known: RecordRevision[JobRecord]
    ) -> RecordRevision[JobRecord]:
        assert known is KNOWN
        return await self.read(job_id)


@pytest.mark.parametrize(
    "work", [lambda p: p.reread(), lambda p: p.change(lambda record: record)], ids=["reread", "change"]
)
async def test_whoever_was_cancelled_while_the_record_came_does_not_go_on(
    work: Callable[[LiveJobRecord], Awaitable[JobRecord]],
) -> None:
    records = SwallowingRecords()
    progress = LiveJobRecord(None, records, KNOWN)  # type: ignore[arg-type]  # nothing is told, and a fake
    task = asyncio.ensure_future(work(progress))
    await records.asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class KeptRecords:
    """One record in memory, and how often it was read."""

    def __init__(self) -> None:
        self.kept, self.reads = KNOWN, 0

    async def read(self, _: str) -> RecordRevision[JobRecord]:
        self.reads += 1
        return self.kept

    async def revise(
        self, _: str, change: Change[JobRecord], known: RecordRevision[JobRecord]
    ) -> RecordRevision[JobRecord]:
        if known.revision != self.kept.revision:
            known = await self.read("")
        following = change(known.record)
        if following is not None and following != known.record:
            self.kept = RecordRevision(following, known.revision + 1)
        return self.kept


class Told:
    """A bus that keeps the states it is to tell."""

    def __init__(self) -> None:
        self.states: list[JobState] = []

    async def publish(self, _: str, event: StateEvent) -> None:
        self.states.append(event.state)


def state_in(records: KeptRecords) -> JobState:
    return records.kept.record.state


def cancelling(record: JobRecord) -> JobRecord:
    return record.model_copy(update={"cancel": True})


def failing(record: JobRecord) -> JobRecord:
    return record.model_copy(update={"causes": (*record.causes, "lost")})


async def test_a_state_is_told_at_once_and_written_with_the_next_change() -> None:
    bus, records = Told(), KeptRecords()
    live = LiveJobRecord(bus, records, KNOWN)  # type: ignore[arg-type]  # fakes
    await live.enter(JobState.PREPARING)
    assert (bus.states, records.kept) == ([JobState.PREPARING], KNOWN)
    await live.change(failing)
    await live.change(lambda record: record.model_copy(update={"state": JobState.RUNNING}))
    states = [state_in(records)]
    await live.enter(JobState.FINISHING)
    await live.change(failing)
    states.append(state_in(records))
    await live.change(lambda record: record.model_copy(update={"state": JobState.RUNNING}))
    await live.change(failing)
    states.append(state_in(records))
    assert states == [JobState.RUNNING, JobState.FINISHING, JobState.RUNNING], "a state is written once"
    assert (records.kept.revision, records.reads) == (6, 0)


async def test_a_state_that_lasts_is_written_by_itself_and_once() -> None:
    records = KeptRecords()
    live = LiveJobRecord(Told(), records, KNOWN)  # type: ignore[arg-type]  # fakes
    before = time.monotonic()
    await live.enter(JobState.PREPARING)
    now = time.monotonic()
    assert not live.unwritten(before + UNWRITTEN_S / 2)
    assert live.unwritten(now + UNWRITTEN_S)
    await live.write_state()
    assert records.kept.record.state is JobState.PREPARING
    assert not live.unwritten(now + UNWRITTEN_S)
    await live.write_state()
    assert records.kept.revision == 2


async def test_a_cancel_that_another_wrote_is_met_at_the_next_change() -> None:
    records = KeptRecords()
    live = LiveJobRecord(Told(), records, KNOWN)  # type: ignore[arg-type]  # fakes
    records.kept = RecordRevision(cancelling(KNOWN.record), 2)
    with pytest.raises(JobCancelled):
        await live.change(failing)


async def test_an_older_revision_that_arrives_later_is_not_the_latest() -> None:
    records = KeptRecords()
    live = LiveJobRecord(Told(), records, KNOWN)  # type: ignore[arg-type]  # fakes
    await live.change(failing)
    records.kept = KNOWN
    assert (await live.reread()).causes == ("lost",)
