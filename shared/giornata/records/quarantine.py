"""Jobs that were given up because every worker that had them was lost: kept, with the causes, for an operator."""

from __future__ import annotations

from nats.js import JetStreamContext
from nats.js.kv import KeyValue

from giornata.records.bucket import RecordBucket
from giornata.wire.errors import JobNotFound
from giornata.wire.jobs import JobRecord
from giornata.wire.stores import QUARANTINE


class Quarantine:
    """The bucket. Make it with :meth:`open`."""

    def __init__(self, bucket: KeyValue) -> None:
        self._records = RecordBucket(bucket, JobRecord, JobNotFound)

    @classmethod
    async def open(cls, jetstream: JetStreamContext) -> Quarantine:
        """Bind to the bucket that :func:`giornata.bus.streams.ensure` made."""
        return cls(await jetstream.key_value(QUARANTINE))

    async def put(self, record: JobRecord) -> None:
        """Keep a job that was given up; the record tells the causes."""
        await self._records.put(record.job.job_id, record)

    async def get(self, job_id: str) -> JobRecord:
        """The record of a job.

        Raises:
            JobNotFound: it is not here.
        """
        return (await self._records.read(job_id))[0]

    async def remove(self, job_id: str) -> JobRecord:
        """Forget a job; its record.

        Raises:
            JobNotFound: it is not here.
        """
        record, revision = await self._records.read(job_id)
        await self._records.delete(job_id, revision)
        return record

    async def all(self) -> list[JobRecord]:
        """The records of all jobs that are here, ordered by id."""
        return sorted(await self._records.matching(">"), key=lambda record: record.job.job_id)
