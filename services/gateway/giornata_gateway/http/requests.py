"""From an HTTP request to an edit that is admitted."""

from __future__ import annotations

import re
from contextlib import ExitStack

from aiohttp import web

from giornata.deadlines import Deadline
from giornata.wire.jobs import Priority
from giornata_gateway.gateway import Admitted
from giornata_gateway.http.errors import GATEWAY, TENANT
from giornata_gateway.http.multipart import read_upload
from giornata_gateway.intake.rules.forms import F, check_source, read_form
from giornata_gateway.intake.rules.idempotency import HEADER, read_key
from giornata_gateway.jobs.preparation import EditOrder

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


async def receive(
    request: web.Request, kind: type[F], priority: Priority, held: ExitStack
) -> tuple[F, Admitted]:
    """The form of a request, and its edit, admitted; on return the pictures are stored and not in memory.

    Args:
        request: not read yet.
        kind: its form.
        priority: the job's.
        held: keeps the job's places until it is closed.

    Raises:
        GiornataError: why it is refused.
    """
    gateway, tenant = request.app[GATEWAY], request[TENANT]
    key = read_key(request.headers.getall(HEADER, ()), HEADER)
    gateway.places.check()
    if key is None:  # a repetition may be answered for nothing, which only its body tells
        gateway.quotas.check(tenant)
    with gateway.uploads.growing() as grow:
        upload = await read_upload(request, grow)
        if not any(name == "template_id" for name, _ in upload.fields):
            check_source(upload.image, None)
        form = read_form(kind, upload.fields, request.headers.get("Accept", ""))
        check_source(upload.image, form.template_id)
        awaited = priority is Priority.INTERACTIVE
        budget_s = gateway.config.budget_s if awaited else gateway.config.job_budget_s
        traceparent = request.headers.get("traceparent", "")
        order = EditOrder(
            parameters=form.parameters(),
            image=upload.image,
            mask=upload.mask,
            tenant=tenant.name,
            weight=tenant.weight,
            priority=priority,
            deadline=Deadline.after_ms(budget_s * 1000),
            template_id=form.template_id,
            traceparent=traceparent if _TRACEPARENT.fullmatch(traceparent) else None,
        )
        return form, await gateway.admit(order, key, tenant, held)


def base_url(request: web.Request) -> str:
    """How the client reaches this gateway; empty, so that links are relative, where its Host header is no host."""
    configured = request.app[GATEWAY].config.public_url
    try:
        return configured or str(request.url.origin())
    except ValueError:
        return ""
