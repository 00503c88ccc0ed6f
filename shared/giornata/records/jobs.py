"""Job records in JetStream's key-value store: read, create, change by revision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from nats.js import JetStreamContext
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue

from giornata.bus.patience import repeated, written
from giornata.bus.streams import RECORDS
from giornata.wire import codec
from giornata.wire.errors import InternalError, JobNotFound
from giornata.wire.jobs import JobRecord

Change = Callable[[JobRecord], JobRecord | None]
"""A pure function from the present record to the next, or None to leave it as it is."""

MAX_CONFLICTS = 50
"""Losing this many races in a row means that something is wrong, not that the record is busy."""


class Records:
    """The bucket of job records. Make it with :meth:`open`.

    A cluster of NATS servers that chooses a leader is waited for. A write that is not answered may have been taken.
    """

    def __init__(self, bucket: KeyValue) -> None:
        self._bucket = bucket

    @classmethod
    async def open(cls, jetstream: JetStreamContext) -> Records:
        """Bind to the bucket that :func:`giornata.bus.streams.ensure` made."""
        return cls(await jetstream.key_value(RECORDS))

    async def get(self, job_id: str) -> JobRecord:
        """The record of a job.

        Raises:
            JobNotFound: there is none.
        """
        record, _ = await self._read(job_id)
        return record

    async def create(self, record: JobRecord) -> bool:
        """Write the first revision; False if the job has a record already (a repeated submission)."""
        try:
            await written(lambda: self._bucket.create(record.job.job_id, codec.encode(record)))
        except KeyWrongLastSequenceError:
            return False
        return True

    async def change(self, job_id: str, change: Change) -> JobRecord:
        """Apply `change` to the present record and write the result, again if somebody else was faster.

        A terminal record is never changed: `change` is not even asked.

        Returns:
            The record as it stands afterwards.

        Raises:
            JobNotFound: there is no record.
        """
        for _ in range(MAX_CONFLICTS):
            record, revision = await self._read(job_id)
            if record.state.terminal:
                return record
            following = change(record)
            if following is None or following == record:
                return record
            try:
                data = codec.encode(following)
                await written(partial(self._bucket.update, job_id, data, last=revision))
            except KeyWrongLastSequenceError:
                continue
            return following
        raise InternalError(f"The record of job {job_id} is changed by too many at once.")

    async def _read(self, job_id: str) -> tuple[JobRecord, int]:
        try:
            entry = await repeated(lambda: self._bucket.get(job_id))
        except KeyNotFoundError as error:
            raise JobNotFound(received=job_id) from error
        if entry.value is None or entry.revision is None:
            raise JobNotFound(received=job_id)
        return codec.decode(JobRecord, entry.value), entry.revision
