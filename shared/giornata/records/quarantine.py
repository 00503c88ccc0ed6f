"""Jobs that were given up because every worker that had them was lost: kept, with the causes, for an operator."""

from __future__ import annotations

from nats.js import JetStreamContext
from nats.js.kv import KeyValue

from giornata.records.bucket import RecordBucket
from giornata.wire.errors import JobNotFound
from giornata.wire.jobs import JobRecord
from giornata.wire.stores import QUARANTINE


class Quarantine(RecordBucket[JobRecord]):
    """The bucket, by job id; an unknown id raises JobNotFound. Make it with :meth:`open`."""

    def __init__(self, bucket: KeyValue) -> None:
        super().__init__(bucket, JobRecord, lambda record: record.job.job_id, JobNotFound)

    @classmethod
    async def open(cls, jetstream: JetStreamContext) -> Quarantine:
        """Bind to the bucket that :func:`giornata.bus.streams.ensure` made."""
        return cls(await jetstream.key_value(QUARANTINE))

    async def remove(self, job_id: str) -> JobRecord:
        """Forget a job; its record."""
        record, revision = await self.read(job_id)
        await self.delete(job_id, revision)
        return record

    async def all(self) -> list[JobRecord]:
        """The records of all jobs that are here, ordered by id."""
        return sorted(await self.matching(">"), key=lambda record: record.job.job_id)
