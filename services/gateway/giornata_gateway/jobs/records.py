"""The job records as a gateway reads them, which may start before their bucket is there."""

from __future__ import annotations

import asyncio

from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from giornata.records import Change, JobRecordStore
from giornata.wire.errors import JobNotFound
from giornata.wire.progress import JobRecord


class JobRecords:
    """Job records by id. No job is known before a router has made the bucket, nor after its loss."""

    def __init__(self, jetstream: JetStreamContext) -> None:
        self._jetstream = jetstream
        self._opened: JobRecordStore | None = None
        self._opening = asyncio.Lock()

    async def get(self, job_id: str) -> JobRecord:
        """A record; an unknown id raises JobNotFound."""
        try:
            return await (await self._open()).get(job_id)
        except NotFoundError as error:
            raise JobNotFound(received=job_id) from error

    async def change(self, job_id: str, change: Change[JobRecord]) -> JobRecord:
        """Change a record as in every bucket; JobNotFound as :meth:`get`."""
        try:
            return await (await self._open()).change(job_id, change)
        except NotFoundError as error:
            raise JobNotFound(received=job_id) from error

    async def _open(self) -> JobRecordStore:
        async with self._opening:
            if self._opened is None:
                self._opened = await JobRecordStore.open(self._jetstream)
        return self._opened
