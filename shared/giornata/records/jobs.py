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


class Records(RecordBucket[JobRecord]):
    """The bucket of job records, by job id; an unknown id raises JobNotFound. Make it with :meth:`open`."""

    def __init__(self, bucket: KeyValue) -> None:
        super().__init__(bucket, JobRecord, lambda record: record.job.job_id, JobNotFound)

    @classmethod
    async def open(cls, jetstream: JetStreamContext) -> Records:
        """Bind to the bucket that :func:`giornata.bus.streams.ensure` made."""
        return cls(await jetstream.key_value(RECORDS))

    async def change(self, key: str, change: Change) -> JobRecord:
        """Change a record as in every bucket. A terminal record stays as it is, and `change` is not called."""
        return await super().change(key, lambda record: None if record.state.terminal else change(record))
