"""Server-sent events at the HTTP door: a job's stream, live or replayed, until its end."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import nats.errors
from aiohttp import web

from giornata.deadlines import Deadline
from giornata.wire.errors import DeadlineExceeded, Failed, from_body
from giornata.wire.events import DoneEvent, PreviewEvent
from giornata.wire.jobs import JobRecord, RowRecord
from giornata_gateway.gateway import Gateway
from giornata_gateway.http.body import JSON_COPIES, end, write
from giornata_gateway.http.errors import OUTCOME, as_known
from giornata_gateway.http.sse import GO_ON_ELSEWHERE, HEADERS, HEARTBEAT, frame
from giornata_gateway.jobs.feed import StreamedEvent, open_feed, until_done
from giornata_gateway.views.answers import error_of
from giornata_gateway.views.stream import (
    COMPLETED,
    ERROR,
    PARTIAL,
    PROGRESS,
    completed_event,
    error_event,
    partial_image_event,
    progress_event,
)


@dataclass(frozen=True)
class Stream:
    """One open answer and the job that it tells about."""

    gateway: Gateway
    request: web.Request
    job_id: str
    base_url: str
    inline: bool
    """Whether pictures travel in the stream, or links to them."""

    async def run(self, ended: asyncio.Future[None], after: int, deadline: Deadline) -> web.StreamResponse:
        """Tell the events with a sequence above `after` until the job has ended, then its pictures or errors.

        Args:
            ended: resolves when the job is terminal.
            after: what ``Last-Event-ID`` named; 0 for all.
            deadline: when to stop telling, whether the job has ended or not.
        """
        async with open_feed(self.gateway.bus, self.job_id, after, self.gateway.restore) as told:
            response = web.StreamResponse(headers=HEADERS)
            await response.prepare(self.request)  # a few headers: they fit the socket's buffer
            try:
                last = await self._tell_progress(response, told, ended, deadline)
                await self._tell_end(response, ended, last)
            except ConnectionError:
                raise
            except Exception as error:  # noqa: BLE001 - the answer has begun: logged and told inside it
                known = as_known(error, self.request.path)
                self.request[OUTCOME] = known.code
                await self._write(response, frame(ERROR, error_event(known, self.job_id)))
            await end(self.request, response)
            return response

    async def _tell_progress(
        self,
        response: web.StreamResponse,
        told: asyncio.Queue[StreamedEvent | None],
        ended: asyncio.Future[None],
        deadline: Deadline,
    ) -> StreamedEvent | None:
        """Relay states, steps and previews; the job's last event, or None where the stream lost it."""
        async for item in until_done(told, ended, self.gateway.config.heartbeat_s, deadline):
            if item is None:
                await self._write(response, HEARTBEAT)
                record = await self._record()
                if record is not None and record.state.terminal:
                    return None  # its last event was lost
            elif isinstance(item.event, DoneEvent):
                return item
            elif isinstance(item.event, PreviewEvent):
                await self._tell_preview(response, item.event, item.time, item.sequence)
            else:
                await self._write(response, frame(PROGRESS, progress_event(item.event), item.sequence))
        return None

    async def _tell_preview(
        self, response: web.StreamResponse, event: PreviewEvent, at: int, sequence: int
    ) -> None:
        record = await self._record()
        if record is not None:  # a preview is not worth the stream
            await self._write(response, frame(PARTIAL, partial_image_event(record, event, at), sequence))

    async def _record(self) -> JobRecord | None:
        """The job's record; None where NATS does not answer, since the stream outlives an outage."""
        try:
            return await self.gateway.ledger.records.get(self.job_id)
        except nats.errors.Error:
            return None

    async def _tell_end(
        self, response: web.StreamResponse, ended: asyncio.Future[None], last: StreamedEvent | None
    ) -> None:
        """Completed pictures first, since OpenAI's clients stop at the first error; the last frame has the id."""
        record = await self.gateway.ledger.records.get(self.job_id)
        if not record.state.terminal:
            if ended.done() and not self.inline:  # a reader that only looks on loses nothing
                await self._write(response, GO_ON_ELSEWHERE)
                return
            if ended.done():
                ended.result()  # raises why this gateway stopped waiting
            raise DeadlineExceeded
        sequence, at = (None, int(time.time())) if last is None else (last.sequence, last.time)
        error = error_of(record)
        if error is not None:
            self.request[OUTCOME] = error.code
            await self._write(response, frame(ERROR, error_event(error, self.job_id), sequence))
            return
        rows = [*record.images, *(row for row in record.rows if row.error is not None)]
        for row in rows:
            await self._tell_row(response, record, row, at, sequence if row is rows[-1] else None)

    async def _tell_row(
        self, response: web.StreamResponse, record: JobRecord, row: RowRecord, at: int, sequence: int | None
    ) -> None:
        if row.image is None:
            error = from_body(row.error) if row.error is not None else Failed()
            await self._write(response, frame(ERROR, error_event(error, self.job_id, row.index), sequence))
            return
        size_bytes = row.image.size_bytes * JSON_COPIES if self.inline else 0
        async with self.gateway.answers.room(size_bytes):
            picture = await self.gateway.picture(row.image) if self.inline else None
            event = await asyncio.to_thread(completed_event, record, row, picture, self.base_url, at)
            await self._write(response, await asyncio.to_thread(frame, COMPLETED, event, sequence))

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        await write(self.request, response, data)
