"""``POST /v1/images/edits``: an edit that the client waits for."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack

from aiohttp import web

from giornata.wire.jobs import JobRecord, Priority
from giornata_gateway.http.body import JSON_COPIES, send
from giornata_gateway.http.errors import GATEWAY, JOB_ID, OUTCOME, REPEATED, json_answer
from giornata_gateway.http.requests import base_url, receive
from giornata_gateway.http.stream import Stream
from giornata_gateway.intake.rules.forms import EditForm, ResponseFormat
from giornata_gateway.views.answers import error_of, images_answer


async def edit(request: web.Request) -> web.StreamResponse:
    """Carry out an edit and answer with its pictures; a client that leaves cancels it."""
    gateway = request.app[GATEWAY]
    with ExitStack() as held:
        form, admitted = await receive(request, EditForm, Priority.INTERACTIVE, held)
        async with gateway.awaited(admitted) as awaited:
            request[JOB_ID] = awaited.job.job_id
            request[REPEATED] = admitted.stay.repeated
            if form.stream:
                stream = Stream(gateway, request, awaited.job.job_id, base_url(request), inline=True)
                response = await stream.run(awaited.ended, 0, awaited.deadline)
                if request.get(OUTCOME) is None:
                    admitted.carried_out()
                return response
            record = await gateway.submission.outcome(awaited)
        admitted.carried_out()
    return await _answer(request, form, record)


async def _answer(request: web.Request, form: EditForm, record: JobRecord) -> web.StreamResponse:
    error = error_of(record)
    if error is not None:
        raise error
    gateway, base, now = request.app[GATEWAY], base_url(request), int(time.time())
    headers = {"X-Giornata-Job": record.job.job_id}
    if form.response_format is ResponseFormat.URL:
        return json_answer(images_answer(record, None, base, now), headers=headers)
    raw = form.response_format is ResponseFormat.IMAGE
    size_bytes = sum(row.image.size_bytes for row in record.images if row.image is not None)
    async with gateway.answers.room(size_bytes * (1 if raw else JSON_COPIES)):
        pictures = {row.index: await gateway.picture(row.image) for row in record.images if row.image}
        if raw:
            content_type = f"image/{record.job.parameters.output_format}"
            return await send(request, pictures[0], content_type, headers)
        body = await asyncio.to_thread(
            lambda: images_answer(record, pictures, base, now).model_dump_json().encode()
        )
        pictures.clear()
        return await send(request, body, "application/json", headers)
