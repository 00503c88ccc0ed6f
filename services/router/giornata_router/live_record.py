"""One job's record as its walk knows it: changed by revision, looked at for a cancel or an end, told in events."""

from __future__ import annotations

import asyncio

from giornata.bus.bus import Bus
from giornata.records import Change, Records
from giornata.wire import subjects
from giornata.wire.errors import JobCancelled
from giornata.wire.events import DoneEvent, EventKind, StateEvent
from giornata.wire.jobs import Job, JobRecord, JobState


def heed_cancel() -> None:
    """Raise what Python 3.11's wait_for, which nats-py uses, may have swallowed: that this task is cancelled.

    A task that went on would wait for ever, or begin tasks in a group that ends.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


class EndedError(Exception):
    """The job is terminal, and not by this walk: it was cancelled uncarried, or another router ended it."""


class LiveRecord:
    """A job's record, and the events that tell of it."""

    def __init__(self, bus: Bus, records: Records, record: JobRecord) -> None:
        self._bus, self._records = bus, records
        self.record = record
        """The record as last seen; where several tasks change it at once, the answer of :meth:`change` is newer."""
        self.doing = "waiting in the queue"
        """What the job was at, for the error that says that its time is over."""

    @property
    def job(self) -> Job:
        """The job."""
        return self.record.job

    async def change(self, change: Change[JobRecord]) -> JobRecord:
        """The record as it stands afterwards.

        Raises:
            EndedError: it is terminal.
            JobCancelled: a cancel was asked for.
        """
        record = await self._records.change(self.job.job_id, change)
        return self._checked(record)

    async def reread(self) -> JobRecord:
        """The record as it stands; raises as :meth:`change`."""
        return self._checked(await self._records.get(self.job.job_id))

    async def end(self, change: Change[JobRecord]) -> None:
        """Write the terminal state, if there is none yet."""
        self.record = await self._records.change(self.job.job_id, change)

    async def tell(self, state: JobState, attempt: int | None = None) -> None:
        """Tell that the job is in a state that is not terminal, in `attempt`, or in the latest one."""
        number = self.record.attempt if attempt is None else attempt
        event = StateEvent(job_id=self.job.job_id, state=state, attempt=number)
        await self._publish(EventKind.STATE, event)

    async def tell_end(self) -> None:
        """Tell that the job has ended. A router that was believed dead, or the next one, may tell it again."""
        record = self.record
        event = DoneEvent(
            job_id=self.job.job_id,
            state=record.state,
            error=record.error,
            stage_ms=record.stage_ms,
            slo_met=record.slo_met,
        )
        await self._publish(EventKind.DONE, event, message_id=f"{self.job.job_id}-done")

    def check(self) -> None:
        """Raise as :meth:`change` where the record tells of a cancel or an end."""
        self._checked(self.record)

    def _checked(self, record: JobRecord) -> JobRecord:
        self.record = record
        heed_cancel()
        if record.state.terminal:
            raise EndedError
        if record.cancel:
            raise JobCancelled
        return record

    async def _publish(
        self, kind: EventKind, event: StateEvent | DoneEvent, *, message_id: str | None = None
    ) -> None:
        subject = subjects.event(self.job.gateway, self.job.job_id, kind)
        await self._bus.publish(subject, event, message_id=message_id)
