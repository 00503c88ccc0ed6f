"""``/v1/jobs``: edits that nobody waits for, and what has become of them."""

from __future__ import annotations

from contextlib import ExitStack

from aiohttp import web

from giornata.wire.errors import BadRequest, InvalidField, JobNotFinished, from_body
from giornata.wire.jobs import JobRecord, JobState, Priority, Row
from giornata_gateway.http.body import send
from giornata_gateway.http.edits import base_url, receive, tenant_of_request
from giornata_gateway.http.errors import GATEWAY, JOB_ID, REPEATED, json_answer
from giornata_gateway.http.sse import last_event_id
from giornata_gateway.http.stream import Stream
from giornata_gateway.intake.rules.forms import JobForm
from giornata_gateway.jobs.feed import done_sequence, known_sequence
from giornata_gateway.views.answers import CONTENT_TYPES, error_of
from giornata_gateway.views.jobs import JobView, job_view, steps_of


async def create(request: web.Request) -> web.Response:
    """Accept a job: 202 with its status and its Location. It holds its places only until it is accepted."""
    gateway = request.app[GATEWAY]
    with ExitStack() as places:
        received = await receive(request, JobForm, Priority.BATCH, places)
        job = await gateway.submit(received.prepared, received.place)
        request[REPEATED] = received.place.repeated
    request[JOB_ID] = job.job_id
    record = await gateway.submission.read(job.job_id)
    location = f"{gateway.config.public_url}/v1/jobs/{job.job_id}"
    return json_answer(await _view(request, record), status=202, headers={"Location": location})


async def status(request: web.Request) -> web.Response:
    """How far a job is."""
    return json_answer(await _view(request, await _record(request)))


async def cancel(request: web.Request) -> web.Response:
    """Cancel a job: 202, it ends at its next step. A job that has ended stays as it is: 200 and its status."""
    record = await request.app[GATEWAY].submission.cancel((await _record(request)).job.job_id)
    return json_answer(await _view(request, record), status=200 if record.state.terminal else 202)


async def image(request: web.Request) -> web.StreamResponse:
    """One finished picture, as it was encoded."""
    record = await _record(request)
    row = _row(request, record)
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
    gateway = request.app[GATEWAY]
    content_type = CONTENT_TYPES[record.job.parameters.output_format]
    async with gateway.answers.room(row.image.size_bytes):
        return await send(request, await gateway.picture(row.image), content_type, headers)


async def events(request: web.Request) -> web.StreamResponse:
    """A job's events as server-sent events, those after Last-Event-ID; 204 when there is nothing left to tell.

    204 is what stops a browser's EventSource from connecting again.
    """
    gateway = request.app[GATEWAY]
    record = await _record(request)
    job = record.job
    after = last_event_id(request.headers.get("Last-Event-ID"))
    after = await known_sequence(gateway.bus, after)
    with gateway.watching(), gateway.waiting.expect(job.job_id, watching=True) as ended:
        record = await gateway.submission.read(job.job_id)
        if record.state.terminal:
            last = await done_sequence(gateway.bus, job)
            if last is not None and after >= last:
                return web.Response(status=204)
            if not ended.done():
                ended.set_result(None)
        stream = Stream(gateway, request, job.job_id, base_url(request), inline=False)
        return await stream.run(ended, after, gateway.deadline(job.intermediate_ttl_s))


async def _record(request: web.Request) -> JobRecord:
    job_id = request.match_info["job_id"]
    request[JOB_ID] = job_id
    return await request.app[GATEWAY].submission.record(job_id, tenant_of_request(request).name)


def _row(request: web.Request, record: JobRecord) -> Row:
    text = request.query.get("index", "0")
    accepted = f"0 to {len(record.rows) - 1}"
    unknown = set(request.query) - {"index"}
    if unknown:
        raise BadRequest("Unknown query parameter.", received=", ".join(sorted(unknown)), accepted="index")
    if not (text.isascii() and text.isdigit() and int(text[:9]) < len(record.rows)):
        raise InvalidField("The job has no such picture.", field="index", received=text, accepted=accepted)
    return record.rows[int(text)]


async def _view(request: web.Request, record: JobRecord) -> JobView:
    forecast = await request.app[GATEWAY].submission.forecast(record)
    steps = steps_of(record, request.app[GATEWAY].fleet.states())
    return job_view(record, steps, base_url(request), forecast)
