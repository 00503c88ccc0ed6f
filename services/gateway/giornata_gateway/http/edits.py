"""``POST /v1/images/edits``: an edit that the client waits for."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Generic

from aiohttp import web

from giornata.wire.errors import DeadlineExceeded
from giornata.wire.jobs import JobRecord, Priority
from giornata_gateway.gateway import Gateway, Place
from giornata_gateway.http.body import JSON_COPIES, send
from giornata_gateway.http.errors import GATEWAY, JOB_ID, OUTCOME, REPEATED, TENANT, json_answer
from giornata_gateway.http.multipart import Limits, read_upload
from giornata_gateway.http.stream import Stream
from giornata_gateway.intake.memory import Grow
from giornata_gateway.intake.rules.forms import (
    EditForm,
    F,
    JobForm,
    ResponseFormat,
    Upload,
    check_source,
    read_form,
)
from giornata_gateway.intake.rules.idempotency import HEADER, read_key
from giornata_gateway.intake.rules.tenants import Tenant, bearer
from giornata_gateway.jobs.preparation import Order, Prepared
from giornata_gateway.jobs.sharing import identified
from giornata_gateway.views.answers import CONTENT_TYPES, error_of, images_answer

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True)
class Received(Generic[F]):
    """A request that was read and admitted, and whose pictures are stored."""

    form: F
    place: Place
    prepared: Prepared


async def edit(request: web.Request) -> web.StreamResponse:
    """Carry out an edit and answer with its pictures; a client that leaves cancels it."""
    gateway = request.app[GATEWAY]
    with ExitStack() as places:
        received = await receive(request, EditForm, Priority.INTERACTIVE, places)
        form = received.form
        async with gateway.held(received.prepared, received.place) as held:
            request[JOB_ID] = held.job.job_id
            request[REPEATED] = received.place.repeated
            if form.stream:
                stream = Stream(gateway, request, held.job.job_id, base_url(request), inline=True)
                response = await stream.run(held.ended, 0, held.deadline)
                if request.get(OUTCOME) is None:
                    received.place.carried_out()
                return response
            record = await gateway.submission.outcome(held)
        received.place.carried_out()
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
            return await send(
                request, pictures[0], CONTENT_TYPES[record.job.parameters.output_format], headers
            )
        body = await asyncio.to_thread(
            lambda: images_answer(record, pictures, base, now).model_dump_json().encode()
        )
        pictures.clear()
        return await send(request, body, "application/json", headers)


async def receive(request: web.Request, kind: type[F], priority: Priority, places: ExitStack) -> Received[F]:
    """Authenticate, read, validate, admit and store a request; on return no picture is in memory any more.

    Args:
        request: not read yet.
        kind: its form.
        priority: of the job.
        places: keeps the job's places until it is left.

    Raises:
        GiornataError: why it is refused.
    """
    gateway = request.app[GATEWAY]
    tenant = request[TENANT] = tenant_of_request(request)
    key = read_key(request.headers.getall(HEADER, ()), HEADER)
    gateway.admission.check()
    if key is None:  # a repetition may be answered for nothing, which only its body tells
        gateway.quotas.check(tenant)
    with gateway.uploads.growing() as grow:
        upload, form = await _read(request, kind, grow)
        order = await identified(_order(request, upload, form, tenant, priority), key)
        known = await gateway.sharing.known(order)
        if known is not None:
            return Received(form, places.enter_context(gateway.waiter()), known)
        place = places.enter_context(gateway.place(tenant, form.n, order.job_id, order.longest_s))
        return Received(form, place, await gateway.prepare(order))


def tenant_of_request(request: web.Request) -> Tenant:
    """Who asks."""
    return request.app[GATEWAY].tenant(bearer(request.headers.get("Authorization")))


def base_url(request: web.Request) -> str:
    """How the client reaches this gateway; empty, so that links are relative, where its Host header is no host."""
    configured = request.app[GATEWAY].config.public_url
    try:
        return configured or str(request.url.origin())
    except ValueError:
        return ""


async def _read(request: web.Request, kind: type[F], grow: Grow) -> tuple[Upload, F]:
    """The pictures and the form of a request."""
    upload = await received_upload(request, grow)
    if not any(name == "template_id" for name, _ in upload.fields):
        check_source(upload.image, None)
    form = read_form(kind, upload.fields, request.headers.get("Accept", ""))
    check_source(upload.image, form.template_id)
    return upload, form


async def received_upload(request: web.Request, grow: Grow) -> Upload:
    """The body of a request.

    Raises:
        DeadlineExceeded: the client is too slow in sending it.
        GiornataError: why it is refused.
    """
    config = request.app[GATEWAY].config
    limits = Limits(config.max_file_bytes, config.max_request_bytes, config.max_parts, config.max_field_bytes)
    try:
        async with asyncio.timeout(config.receive_s):
            return await read_upload(request, limits, grow)
    except TimeoutError as error:
        raise DeadlineExceeded("The request was not received in time.") from error


def _order(request: web.Request, upload: Upload, form: JobForm, tenant: Tenant, priority: Priority) -> Order:
    """The order in a request; its time begins now."""
    gateway: Gateway = request.app[GATEWAY]
    config = gateway.config
    traceparent = request.headers.get("traceparent", "")
    return Order(
        parameters=form.parameters(),
        image=upload.image,
        mask=upload.mask,
        tenant=tenant.name,
        weight=tenant.weight,
        priority=priority,
        deadline=gateway.deadline(
            config.budget_s if priority is Priority.INTERACTIVE else config.job_budget_s
        ),
        template_id=form.template_id,
        traceparent=traceparent if _TRACEPARENT.fullmatch(traceparent) else None,
    )
