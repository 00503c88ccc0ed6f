"""Job records: read, create, change by revision."""

from __future__ import annotations

from collections.abc import Callable

from nats.js import JetStreamContext
from nats.js.kv import KeyValue

from giornata.records.bucket import RecordBucket
from giornata.wire.errors import JobNotFound
from giornata.wire.jobs import JobRecord
from giornata.wire.stores import RECORDS

Change = Callable[[JobRecord], JobRecord | None]
"""A pure function from the present record to the next, or None to leave it as it is."""


class Records:
    """The bucket of job records. Make it with :meth:`open`; see :class:`~giornata.records.bucket.RecordBucket`."""

    def __init__(self, bucket: KeyValue) -> None:
        self._records = RecordBucket(bucket, JobRecord, JobNotFound)

    @classmethod
    async def open(cls, jetstream: JetStreamContext) -> Records:
        """Bind to the bucket that :func:`giornata.bus.streams.ensure` made."""
        return cls(await jetstream.key_value(RECORDS))

    async def get(self, job_id: str) -> JobRecord:
        """The record of a job.

        Raises:
            JobNotFound: there is none.
        """
        return (await self._records.read(job_id))[0]

    async def create(self, record: JobRecord) -> bool:
        """Write the first revision; False if the job has a record already (a repeated submission)."""
        return await self._records.create(record.job.job_id, record)

    async def change(self, job_id: str, change: Change) -> JobRecord:
        """Apply `change` to the present record and write the result, again if another writer was faster.

        A terminal record is never changed: `change` is not even asked.

        Returns:
            The record as it stands afterwards.

        Raises:
            JobNotFound: there is no record.
        """
        return await self._records.change(
            job_id, lambda record: None if record.state.terminal else change(record)
        )
