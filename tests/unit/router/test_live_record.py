"""A job's record as its walk knows it: a cancellation on the way is not lost with the answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from giornata.records import Change, Revised
from giornata.wire.jobs import JobRecord
from giornata_router.live_record import LiveRecord
from giornata_router.rules import transitions
from tests.contract.messages import JOB

KNOWN = Revised(transitions.accepted(JOB), 1)


class SwallowingRecords:
    """Answers once asked to stop, as Python 3.11's wait_for does where both come at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def read(self, job_id: str) -> Revised[JobRecord]:
        assert job_id == JOB.job_id
        self.asked.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return KNOWN

    async def revise(
        self, job_id: str, _: Change[JobRecord], known: Revised[JobRecord]
    ) -> Revised[JobRecord]:
        assert known is KNOWN
        return await self.read(job_id)


@pytest.mark.parametrize(
    "work", [lambda p: p.reread(), lambda p: p.change(lambda record: record)], ids=["reread", "change"]
)
async def test_whoever_was_cancelled_while_the_record_came_does_not_go_on(
    work: Callable[[LiveRecord], Awaitable[JobRecord]],
) -> None:
    records = SwallowingRecords()
    progress = LiveRecord(None, records, KNOWN)  # type: ignore[arg-type]  # nothing is told, and a fake
    task = asyncio.ensure_future(work(progress))
    await records.asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
