"""``POST /v1/images/edits``: an edit that the client waits for."""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from giornata.errors import DeadlineExceeded
from giornata.jobs import JobRecord, Priority
from giornata_gateway.answers import CONTENT_TYPES, error_of, images_answer
from giornata_gateway.forms import EditForm, F, JobForm, ResponseFormat, Upload, read_form
from giornata_gateway.gateway import Gateway
from giornata_gateway.http_errors import GATEWAY, JOB_ID, OUTCOME
from giornata_gateway.http_stream import Stream
from giornata_gateway.multipart import Limits, read_upload
from giornata_gateway.submission import Order
from giornata_gateway.tenants import bearer


async def edit(request: web.Request) -> web.StreamResponse:
    """Carry out an edit and answer with its pictures; a client that leaves cancels it."""
    gateway = request.app[GATEWAY]
    tenant = tenant_of_request(request)
    with gateway.place(rows=1) as place:
        upload, form = await read_request(request, EditForm)
        place.widen(form.n)
        async with gateway.submission.held(
            order_of(request, upload, form, tenant, Priority.INTERACTIVE)
        ) as held:
            request[JOB_ID] = held.job.job_id
            if form.stream:
                stream = Stream(gateway, request, held.job.job_id, base_url(request), inline=True)
                response = await stream.run(held.ended, 0, held.deadline)
                if request.get(OUTCOME) is None:
                    place.carried_out()
                return response
            record = await gateway.submission.outcome(held)
        place.carried_out()
        return await _answer(request, form, record)


async def _answer(request: web.Request, form: EditForm, record: JobRecord) -> web.Response:
    error = error_of(record)
    if error is not None:
        raise error
    gateway, base, now = request.app[GATEWAY], base_url(request), int(time.time())
    headers = {"X-Giornata-Job": record.job.job_id}
    if form.response_format is ResponseFormat.URL:
        body = images_answer(record, None, base, now)
        return web.Response(text=body.model_dump_json(), content_type="application/json", headers=headers)
    pictures = {row.index: await gateway.picture(row.image) for row in record.images if row.image is not None}
    if form.response_format is ResponseFormat.IMAGE:
        content_type = CONTENT_TYPES[record.job.parameters.output_format]
        return web.Response(body=pictures[0], content_type=content_type, headers=headers)
    text = await asyncio.to_thread(lambda: images_answer(record, pictures, base, now).model_dump_json())
    return web.Response(text=text, content_type="application/json", headers=headers)


def tenant_of_request(request: web.Request) -> str:
    """Who asks."""
    return request.app[GATEWAY].tenant(bearer(request.headers.get("Authorization")))


def base_url(request: web.Request) -> str:
    """How the client reaches this gateway."""
    return request.app[GATEWAY].config.public_url or str(request.url.origin())


async def read_request(request: web.Request, kind: type[F]) -> tuple[Upload, F]:
    """The pictures and the form of a request.

    Raises:
        DeadlineExceeded: the client is too slow in sending it.
        GiornataError: why it is refused.
    """
    config = request.app[GATEWAY].config
    limits = Limits(config.max_file_bytes, config.max_request_bytes, config.max_parts, config.max_field_bytes)
    try:
        async with asyncio.timeout(config.budget_s):
            upload = await read_upload(request, limits)
    except TimeoutError as error:
        raise DeadlineExceeded("The request was not received in time.") from error
    return upload, read_form(kind, upload.fields, request.headers.get("Accept", ""))


def order_of(request: web.Request, upload: Upload, form: JobForm, tenant: str, priority: Priority) -> Order:
    """The order in a request; its time begins now."""
    gateway: Gateway = request.app[GATEWAY]
    config = gateway.config
    return Order(
        parameters=form.parameters(),
        image=upload.image,
        mask=upload.mask,
        tenant=tenant,
        priority=priority,
        deadline=gateway.deadline(
            config.budget_s if priority is Priority.INTERACTIVE else config.job_budget_s
        ),
        traceparent=request.headers.get("traceparent", "")[:64] or None,
    )
