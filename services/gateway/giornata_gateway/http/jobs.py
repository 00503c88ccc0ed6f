"""``/v1/images/…`` and ``/v1/jobs``: pictures that a client waits for, jobs without an open connection, events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import nats.errors
from aiohttp import web

from giornata.deadlines import Deadline
from giornata.wire.errors import DeadlineExceeded, Failed, JobNotFinished, TaskNotSupported, from_body
from giornata.wire.jobs import Job, JobRecord, JobState, RowRecord
from giornata.wire.messages import DoneEvent, PreviewEvent
from giornata_gateway.http.requests import check_query, last_event_id, number_of, receive
from giornata_gateway.http.responses import (
    EVENT_STREAM,
    GATEWAY,
    JOB_ID,
    JSON,
    JSON_COPIES,
    OUTCOME,
    REPEATED,
    TENANT,
    as_known,
    base_path,
    base_url,
    end,
    frame,
    json_answer,
    looking_on,
    room,
    send_pictures,
    write,
)
from giornata_gateway.jobs.events import (
    StepEventBuffer,
    StreamedEvent,
    done_sequence,
    known_sequence,
    open_feed,
    until_done,
)
from giornata_gateway.rules.forms import (
    EditForm,
    GenerationForm,
    GenerationJobForm,
    JobForm,
    ResponseFormat,
)
from giornata_gateway.views.jobs import (
    ImagesAnswer,
    JobView,
    ToldEvent,
    completed_event,
    error_event,
    error_of,
    images_answer,
    job_view,
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
            return await self.request.app[GATEWAY].ledger.get(self.job.job_id)
        except nats.errors.Error:
            return None

    async def _tell_end(self, last: StreamedEvent | None) -> None:
        """Completed pictures first, since OpenAI's clients stop at the first error; the last frame has the id."""
        record = await self.request.app[GATEWAY].ledger.get(self.job.job_id)
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


async def vary(_request: web.Request) -> web.StreamResponse:
    """Refuse a variation: it has no prompt, and every family that is served needs one."""
    raise TaskNotSupported(
        "No model that is served makes variations: that takes a network that reads a picture in a prompt's place.",
        received="a variation",
        accepted="POST /v1/images/edits with a prompt; without a mask it repaints the whole picture",
    )


async def carry_out(kind: type[EditForm | GenerationForm], request: web.Request) -> web.StreamResponse:
    """Make the pictures that a form of this kind asks for, and answer with them; a client that leaves cancels it."""
    gateway = request.app[GATEWAY]
    with ExitStack() as held:
        form, admitted = await receive(request, kind, held)
        async with gateway.submission.awaited(admitted, streamed=form.stream and form.progress) as awaited:
            request[JOB_ID] = awaited.job.job_id
            request[REPEATED] = admitted.stay.repeated
            if form.stream:
                stream = JobEventStream(
                    request, awaited.job, awaited.ended, awaited.deadline, inline=True, progress=form.progress
                )
                response = await stream.run(0, awaited.steps)
                if request.get(OUTCOME) is None:
                    admitted.carried_out()
                return response
            record = await gateway.submission.outcome(awaited)
        admitted.carried_out()
    error = error_of(record)
    if error is not None:
        raise error
    base, now = base_url(request), int(time.time())
    headers = {"X-Giornata-Job": record.job.job_id}
    if form.response_format is ResponseFormat.URL:
        return json_answer(images_answer(record, None, base, now), headers=headers)
    refs = {row.index: row.image for row in record.images if row.image is not None}

    def told(pictures: Sequence[bytes]) -> ImagesAnswer:
        return images_answer(record, dict(zip(refs, pictures, strict=True)), base, now)

    answer = content_type(record) if form.response_format is ResponseFormat.IMAGE else told
    return await send_pictures(request, [*refs.values()], headers, answer, gateway.picture)


async def create(request: web.Request) -> web.Response:
    """Accept a job: 202 with its status and its Location. It holds its places only until it is accepted.

    A form is an edit, JSON is a generation.
    """
    gateway = request.app[GATEWAY]
    kind: type[JobForm | GenerationJobForm]
    kind = GenerationJobForm if request.content_type == JSON else JobForm
    with ExitStack() as held:
        form, admitted = await receive(request, kind, held)
        url = None if admitted.known else form.webhook
        async with gateway.webhooks.promised(request[TENANT].name, admitted.job.job_id, url):
            job = await gateway.submission.submit(admitted)
        request[REPEATED] = admitted.stay.repeated
    request[JOB_ID] = job.job_id
    record = await gateway.ledger.get(job.job_id)
    location = f"{base_path(request)}/v1/jobs/{job.job_id}"
    return json_answer(await _view(request, record), status=202, headers={"Location": location})


async def status(request: web.Request) -> web.Response:
    """Return how far a job is."""
    return json_answer(await _view(request, await _record(request)))


async def cancel(request: web.Request) -> web.Response:
    """Cancel a job: 202, it ends at its next step. A job that has ended stays as it is: 200 and its status."""
    record = await request.app[GATEWAY].ledger.cancel((await _record(request)).job.job_id)
    return json_answer(await _view(request, record), status=200 if record.state.terminal else 202)


async def image(request: web.Request) -> web.StreamResponse:
    """One finished picture, as it was encoded."""
    record = await _record(request)
    check_query(request.query, "index")
    rows = record.told_rows
    row = rows[number_of(request.query, "index", 0, len(rows) - 1)]
    if row.error is not None:
        raise from_body(row.error)
    if row.image is None:
        error = error_of(record) if record.state.terminal else None
        raise error or JobNotFinished(received=record.state, accepted=JobState.COMPLETED)
    headers = {
        "ETag": f'"{row.image.sha256}"',
        "Cache-Control": f"private, immutable, max-age={record.job.result_ttl_s}",
    }
    if any(tag.value == row.image.sha256 for tag in request.if_none_match or ()):
        return web.Response(status=304, headers=headers)
    read = request.app[GATEWAY].picture
    return await send_pictures(request, [row.image], headers, content_type(record), read)


async def events(request: web.Request) -> web.StreamResponse:
    """A job's events as server-sent events, those after Last-Event-ID; 204 when there is nothing left to tell.

    204 is what stops a browser's EventSource from connecting again.
    """
    gateway = request.app[GATEWAY]
    job = (await _record(request)).job
    after = await known_sequence(gateway.bus, last_event_id(request.headers))
    response = web.StreamResponse(headers=EVENT_STREAM)
    async with looking_on(request, response):
        with gateway.ends.expect(job.job_id, watching=True) as ended:
            record = await gateway.ledger.get(job.job_id)
            if record.state.terminal:
                last = await done_sequence(gateway.bus, job)
                if last is not None and after >= last:
                    return web.Response(status=204)
                if not ended.done():
                    ended.set_result(None)
            deadline = Deadline.after_ms(job.intermediate_ttl_s * 1000)
            await JobEventStream(request, job, ended, deadline, inline=False, response=response).run(after)
    return response


def content_type(record: JobRecord) -> str:
    """The type of a job's pictures."""
    return f"image/{record.job.parameters.output_format}"


async def _record(request: web.Request) -> JobRecord:
    return await request.app[GATEWAY].ledger.read_of(request[TENANT].name, request.match_info["job_id"])


async def _view(request: web.Request, record: JobRecord) -> JobView:
    gateway = request.app[GATEWAY]
    forecast = None if record.state.terminal else await gateway.ledger.forecast(record.job.job_id)
    return job_view(record, base_url(request), forecast)
