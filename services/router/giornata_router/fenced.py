"""What only the leader does: write job records, and give workers orders."""

from __future__ import annotations

from typing import Final, TypeVar

import nats.errors
import structlog

from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.records import Change, JobRecordStore, RecordRevision
from giornata.wire import codec, subjects
from giornata.wire.jobs import Inspection, Job
from giornata.wire.messages import (
    CancelRows,
    PrefetchTemplate,
    RecordRequest,
    RunAnswer,
    RunReply,
    RunRequest,
)
from giornata.wire.progress import Assignment, JobRecord
from giornata_router.lease import Leadership, LeaseEndedError

Ask = TypeVar("Ask", RunRequest, RecordRequest)
GONE_S: Final = 1.0
"""The server says much sooner that a worker's connection is gone."""

log = structlog.get_logger(__name__)


class LeaderRecords:
    """The job records `records`; a write raises LeaseEndedError instead, once the lease has ended."""

    def __init__(self, records: JobRecordStore, leadership: Leadership) -> None:
        self._records, self._leadership = records, leadership

    async def get(self, job_id: str) -> JobRecord:
        """A record; an unknown id raises JobNotFound."""
        return (await self.read(job_id)).record

    async def read(self, job_id: str) -> RecordRevision[JobRecord]:
        """The present revision of a record; an unknown id raises JobNotFound."""
        return await self._records.read(job_id)

    async def create(self, record: JobRecord) -> int | None:
        """Write the first revision, as in every bucket."""
        self._leadership.check()
        return await self._records.create(record)

    async def put(self, record: JobRecord) -> int:
        """Write a record over one that cannot be read, and return the number of its revision."""
        self._leadership.check()
        return await self._records.put(record)

    async def revise(
        self, job_id: str, change: Change[JobRecord], known: RecordRevision[JobRecord]
    ) -> RecordRevision[JobRecord]:
        """Change a record, as in every bucket. The lease is looked at when the present record is known."""

        def led(record: JobRecord) -> JobRecord | None:
            self._leadership.check()
            return change(record)

        return await self._records.revise(job_id, led, known)


class WorkerClient:
    """The messages to denoisers. Each carries the epoch of the lease, and none is sent after its end."""

    def __init__(self, bus: Bus, leadership: Leadership) -> None:
        self._bus, self._leadership = bus, leadership

    async def run(self, worker: str, request: RunRequest, limit: Deadline) -> RunReply:
        """Ask `worker` to compute rows; raises as :meth:`giornata.bus.bus.Bus.call`, and LeaseEndedError."""
        return await self._ask(subjects.worker(worker, "run"), request, limit)

    async def record(self, worker: str, request: RecordRequest, limit: Deadline) -> RunReply:
        """Ask `worker` to record a template; raises as :meth:`run`."""
        return await self._ask(subjects.worker(worker, "record"), request, limit)

    async def drop(self, job_id: str, assignment: Assignment, *, hand_back: bool = False) -> None:
        """Tell the worker of an attempt to drop its rows, or to hand them back with what it has computed of them."""
        epoch = self._leadership.check()
        message = CancelRows(
            job_id=job_id, attempt=assignment.attempt, epoch=epoch, hand_back=hand_back or None
        )
        await self._bus.publish(subjects.worker(assignment.worker, "cancel"), message)

    async def is_gone(self, job_id: str, assignment: Assignment) -> bool:
        """Tell it again; return whether its connection is gone. It has died then; a frozen one keeps its connection."""
        message = CancelRows(job_id=job_id, attempt=assignment.attempt, epoch=self._leadership.check())
        subject = subjects.worker(assignment.worker, "cancel")
        try:
            await self._bus.client.request(subject, codec.encode(message), timeout=GONE_S)
        except nats.errors.NoRespondersError:
            return True
        except nats.errors.Error:
            pass
        return False

    async def prefetch(self, worker: str, job: Job, inspection: Inspection) -> None:
        """Tell `worker` to load a job's template into memory, and its LoRAs onto the device where there is room."""
        message = PrefetchTemplate(job=job, inspection=inspection, epoch=self._leadership.check())
        await self._bus.publish(subjects.worker(worker, "prefetch"), message)

    async def _ask(self, subject: str, request: Ask, limit: Deadline) -> RunReply:
        told = request.model_copy(update={"epoch": self._leadership.check()})
        reply = await self._bus.call(subject, told, RunReply, limit)
        if reply.answer is RunAnswer.STALE:
            log.error("superseded", subject=subject, epoch=told.epoch)
            self._leadership.end()
            raise LeaseEndedError
        return reply
