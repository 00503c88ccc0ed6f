"""Jobs that were given up since every worker that had them was lost: kept with how, for whoever looks into it."""

from __future__ import annotations

from contextlib import suppress

from nats.js import JetStreamContext
from nats.js.errors import InvalidKeyError, KeyNotFoundError, NoKeysError
from nats.js.kv import KeyValue

from giornata.wire import codec
from giornata.wire.errors import JobNotFound
from giornata.wire.jobs import JobRecord
from giornata.wire.stores import QUARANTINE


class Quarantine:
    """The bucket. Make it with :meth:`open`."""

    def __init__(self, bucket: KeyValue) -> None:
        self._bucket = bucket

    @classmethod
    async def open(cls, jetstream: JetStreamContext) -> Quarantine:
        """Bind to the bucket that :func:`giornata.bus.streams.ensure` made."""
        return cls(await jetstream.key_value(QUARANTINE))

    async def put(self, record: JobRecord) -> None:
        """A job that ended so; its causes are in the record."""
        await self._bucket.put(record.job.job_id, codec.encode(record))

    async def get(self, job_id: str) -> JobRecord:
        """The record of a job.

        Raises:
            JobNotFound: it is not here.
        """
        return (await self._read(job_id))[0]

    async def remove(self, job_id: str) -> JobRecord:
        """Keep a job no longer; what it was.

        Raises:
            JobNotFound: it is not here.
        """
        record, revision = await self._read(job_id)
        await self._bucket.delete(job_id, last=revision)
        return record

    async def _read(self, job_id: str) -> tuple[JobRecord, int | None]:
        """With its revision."""
        try:
            entry = await self._bucket.get(job_id)
        except (KeyNotFoundError, InvalidKeyError) as error:
            raise JobNotFound(received=job_id) from error
        if entry.value is None:
            raise JobNotFound(received=job_id)
        return codec.decode(JobRecord, entry.value), entry.revision

    async def ids(self) -> list[str]:
        """Of all jobs that are here."""
        try:
            return sorted(await self._bucket.keys())
        except NoKeysError:
            return []

    async def all(self) -> list[JobRecord]:
        """Of all jobs that are here, ordered by their ids."""
        found = []
        for job_id in await self.ids():
            with suppress(JobNotFound):  # removed meanwhile
                found.append(await self.get(job_id))
        return found
