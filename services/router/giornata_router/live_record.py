"""One job's record as its walk knows it: changed by revision, looked at for a cancel or an end, told in events.

Beside it is what the next revision will say of the job's time, and how much is left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.records import Change
from giornata.wire import subjects
from giornata.wire.errors import JobCancelled
from giornata.wire.events import DoneEvent, EventKind, StateEvent
from giornata.wire.jobs import JobRecord, JobState
from giornata.wire.values import ComputeTimes, StageTimes
from giornata_router.fenced import LeaderRecords
from giornata_router.rules.transitions import Times

Stage = Literal["prepare", "queue", "denoise", "finish"]
Compute = Literal["inspect", "encode", "denoise", "decode", "paste"]


def heed_cancel() -> None:
    """Raise what Python 3.11's wait_for, which nats-py uses, may have swallowed: that this task is cancelled.

    A task that went on would wait for ever, or begin tasks in a group that ends.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


class EndedError(Exception):
    """The job is terminal, and not by this walk: it was cancelled uncarried, or another router ended it."""


class TimeSheet:
    """Where a job's time goes: adds to the times that the record already holds, of earlier attempts and other routers.

    The job has just waited `waited_ms` in the work queue, which count as spent.
    """

    def __init__(self, record: JobRecord, waited_ms: float = 0.0) -> None:
        self._stage_ms = record.stage_ms.known()
        self._compute_ms = record.compute_ms.known()
        self._stage_ms["queue"] += waited_ms
        self._spent_before_ms = record.spent_ms + int(waited_ms)
        self._began_s = time.monotonic()
        self._denoised: list[tuple[float, float]] = []
        """When rows were begun and done, by the monotonic clock."""

    def compute(self, name: Compute, ms: float) -> None:
        """Add `ms` of computing."""
        self._compute_ms[name] += ms

    @contextmanager
    def timing(self, name: Stage) -> Iterator[None]:
        """Add the time inside to a stage."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self._stage_ms[name] += (time.monotonic() - began_s) * 1000

    @contextmanager
    def denoising(self) -> Iterator[None]:
        """Rows are computed inside; until the first one begins, the job waits in the queue."""
        entered_s = time.monotonic()
        try:
            yield
        finally:
            began_s = min((began for began, _ in self._denoised), default=time.monotonic())
            ended_s = max((ended for _, ended in self._denoised), default=began_s)
            self._stage_ms["queue"] += max(0.0, began_s - entered_s) * 1e3
            self._stage_ms["denoise"] += (ended_s - began_s) * 1e3
            self._denoised.clear()

    def denoised(self, denoise_ms: float) -> None:
        """Rows are computed now; `denoise_ms` passed from their first step to their last."""
        now = time.monotonic()
        self._denoised.append((now - denoise_ms / 1e3, now))

    def times(self) -> Times:
        """The times, as a record holds them."""
        spent_ms = self._spent_before_ms + int((time.monotonic() - self._began_s) * 1000)
        return Times(StageTimes(**self._stage_ms), ComputeTimes(**self._compute_ms), spent_ms)


class LiveRecord:
    """A job's record, the events that tell of it, and the job's time."""

    def __init__(self, bus: Bus, records: LeaderRecords, record: JobRecord, waited_ms: float = 0.0) -> None:
        self._bus, self._records = bus, records
        self.job = record.job
        self.record = record
        """The record as last seen; where several tasks change it at once, the answer of :meth:`change` is newer."""
        self.sheet = TimeSheet(record, waited_ms)
        self.deadline = Deadline.after_ms(self.job.budget_ms - record.spent_ms - waited_ms)
        self.doing = "waiting in the queue"
        """What the job was at, for the error that says that its time is over."""

    async def change(self, change: Change[JobRecord]) -> JobRecord:
        """The record as it stands afterwards; raises as :meth:`check`."""
        self.record = await self._records.change(self.job.job_id, change)
        return self.check()

    async def reread(self) -> JobRecord:
        """The record as it stands; raises as :meth:`check`."""
        self.record = await self._records.get(self.job.job_id)
        return self.check()

    async def end(self, change: Change[JobRecord]) -> None:
        """Write the terminal state, if there is none yet."""
        self.record = await self._records.change(self.job.job_id, change)

    def check(self) -> JobRecord:
        """The record as last seen.

        Raises:
            EndedError: it is terminal.
            JobCancelled: a cancel was asked for.
        """
        heed_cancel()
        if self.record.state.terminal:
            raise EndedError
        if self.record.cancel:
            raise JobCancelled
        return self.record

    async def tell(self, state: JobState, attempt: int) -> None:
        """Tell that the job is in a state that is not terminal."""
        event = StateEvent(job_id=self.job.job_id, state=state, attempt=attempt)
        await self._bus.publish(self._subject(EventKind.STATE), event)

    async def tell_end(self) -> None:
        """Tell that the job has ended. A router that was believed dead, or the next one, may tell it again."""
        record, job_id = self.record, self.job.job_id
        event = DoneEvent(
            job_id=job_id,
            state=record.state,
            error=record.error,
            stage_ms=record.stage_ms,
            slo_met=record.slo_met,
        )
        await self._bus.publish(self._subject(EventKind.DONE), event, message_id=f"{job_id}-done")

    def _subject(self, kind: EventKind) -> str:
        return subjects.event(self.job.gateway, self.job.job_id, kind)
