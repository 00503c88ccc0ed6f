"""Server-sent events at the HTTP door: a job's stream, live or replayed, until its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import nats.errors
from aiohttp import web

from giornata.deadlines import Deadline
from giornata.wire.errors import DeadlineExceeded, Failed, from_body
from giornata.wire.jobs import Job, JobRecord, RowRecord
from giornata.wire.messages import DoneEvent, PreviewEvent
from giornata_gateway.http.body import EVENT_STREAM, JSON_COPIES, end, frame, room, write
from giornata_gateway.http.errors import GATEWAY, OUTCOME, as_known
from giornata_gateway.http.requests import base_url
from giornata_gateway.jobs.feed import StepEventBuffer, StreamedEvent, open_feed, until_done
from giornata_gateway.views.answers import error_of
from giornata_gateway.views.jobs import (
    ToldEvent,
    completed_event,
    error_event,
    partial_image_event,
    progress_event,
)

HEARTBEAT = b": still working\n"
"""A comment; keeps proxies from closing a quiet connection.

No empty line ends it: OpenAI's client for Python takes that for an event without data, and fails.
"""
GO_ON_ELSEWHERE = b": this gateway leaves; another one goes on after your Last-Event-ID\nretry: 500\n\n"
"""The end of a stream whose job goes on. It is no error, so that clients connect again after `retry` milliseconds."""


@dataclass(frozen=True)
class JobEventStream:
    """One open answer and the job that it tells about."""

    request: web.Request
    job: Job
    ended: asyncio.Future[None]
    """Resolves when the job is terminal."""
    deadline: Deadline
    """When to stop telling, whether the job has ended or not."""
    inline: bool
    """Whether pictures travel in the stream, or links to them."""
    progress: bool = True
    """Whether states and steps are told, which OpenAI's clients do not know."""
    response: web.StreamResponse = field(default_factory=lambda: web.StreamResponse(headers=EVENT_STREAM))

    async def run(self, after: int, steps: StepEventBuffer | None = None) -> web.StreamResponse:
        """Tell the events with a sequence above `after` until the job has ended, then its pictures or errors.

        Steps are told as they were heard, without `steps` from now on.
        """
        gateway = self.request.app[GATEWAY]
        async with open_feed(gateway.bus, self.job.job_id, after, gateway.restore, steps) as told:
            await self.response.prepare(self.request)  # a few headers: they fit the socket's buffer
            try:
                events = until_done(told, self.ended, gateway.config.heartbeat_s, self.deadline)
                await self._tell_end(await self._tell_progress(events))
            except ConnectionError:
                raise
            except Exception as error:  # noqa: BLE001 - the answer has begun: logged and told inside it
                known = as_known(error, self.request.path)
                self.request[OUTCOME] = known.code
                await self._tell(error_event(known, self.job.job_id))
            await end(self.request, self.response)
            return self.response

    async def _tell_progress(self, told: AsyncIterator[StreamedEvent | None]) -> StreamedEvent | None:
        """Relay states, steps and previews; the job's last event, or None where the stream lost it."""
        async for item in told:
            if item is None:
                await write(self.request, self.response, HEARTBEAT)
                record = await self._record()
                if record is not None and record.state.terminal:
                    return None  # its last event was lost
            elif isinstance(item.event, DoneEvent):
                return item
            elif not isinstance(item.event, PreviewEvent):
                if self.progress:
                    await self._tell(progress_event(self.job.task, item.event), item.sequence)
                else:
                    await write(self.request, self.response, HEARTBEAT)
            elif (record := await self._record()) is not None:  # a preview is not worth the stream
                await self._tell(partial_image_event(record, item.event, item.time), item.sequence)
        return None

    async def _record(self) -> JobRecord | None:
        """The job's record; None where NATS does not answer, since the stream outlives an outage."""
        try:
            return await self.request.app[GATEWAY].ledger.records.get(self.job.job_id)
        except nats.errors.Error:
            return None

    async def _tell_end(self, last: StreamedEvent | None) -> None:
        """Completed pictures first, since OpenAI's clients stop at the first error; the last frame has the id."""
        record = await self.request.app[GATEWAY].ledger.records.get(self.job.job_id)
        if not record.state.terminal:
            if self.ended.done() and not self.inline:  # a reader that only looks on loses nothing
                await write(self.request, self.response, GO_ON_ELSEWHERE)
                return
            if self.ended.done():
                self.ended.result()  # raises why this gateway stopped waiting
            raise DeadlineExceeded
        sequence, at = (None, int(time.time())) if last is None else (last.sequence, last.time)
        error = error_of(record)
        if error is not None:
            self.request[OUTCOME] = error.code
            await self._tell(error_event(error, self.job.job_id), sequence)
            return
        rows = [*record.images, *(row for row in record.told_rows if row.error is not None)]
        for row in rows:
            await self._tell_row(record, row, at, sequence if row is rows[-1] else None)

    async def _tell_row(self, record: JobRecord, row: RowRecord, at: int, sequence: int | None) -> None:
        if row.image is None:
            error = from_body(row.error) if row.error is not None else Failed()
            await self._tell(error_event(error, self.job.job_id, row.index), sequence)
            return
        gateway, base = self.request.app[GATEWAY], base_url(self.request)
        async with room(self.request, row.image.size_bytes * JSON_COPIES if self.inline else 0):
            picture = await gateway.picture(row.image) if self.inline else None
            event = await asyncio.to_thread(completed_event, record, row, picture, base, at)
            framed = await asyncio.to_thread(frame, event.type, event, sequence)
            await write(self.request, self.response, framed)

    async def _tell(self, event: ToldEvent, sequence: int | None = None) -> None:
        await write(self.request, self.response, frame(event.type, event, sequence))
