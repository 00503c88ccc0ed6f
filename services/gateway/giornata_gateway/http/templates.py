"""``/v1/templates``: pictures that are registered once and edited often."""

from __future__ import annotations

import secrets
from typing import Final

from aiohttp import web

from giornata.deadlines import Deadline
from giornata_gateway.http.errors import GATEWAY, TENANT, json_answer
from giornata_gateway.http.requests import base_path, check_query, number_of, page_of
from giornata_gateway.http.uploads import read_upload
from giornata_gateway.intake.rules.forms import read_template_form
from giornata_gateway.views.templates import TemplateDeleted, template_list, template_view

MAX_WAIT_MS: Final = 60_000


async def register(request: web.Request) -> web.Response:
    """Register a template: 202 with its state and its Location, once a worker records it."""
    gateway, tenant = request.app[GATEWAY], request[TENANT]
    gateway.places.check(tenant)
    gateway.quotas.check(tenant)
    with gateway.uploads.growing(tenant) as grow:
        upload = await read_upload(request, grow)
        form = read_template_form(upload)
        budget_s = gateway.config.budget_s
        with gateway.stay(tenant, 1, f"registration_{secrets.token_urlsafe(9)}", budget_s):
            deadline = Deadline.after_ms(budget_s * 1000)
            record = await gateway.registration.register(tenant.name, upload.picture, form, deadline)
    location = f"{base_path(request)}/v1/templates/{record.template_id}"
    return json_answer(template_view(record), status=202, headers={"Location": location})


async def status(request: web.Request) -> web.Response:
    """How far a template is; with `wait_ms`, once it is recorded or could not be, at the latest after that time."""
    gateway, tenant, name = request.app[GATEWAY], request[TENANT], request.match_info["template_id"]
    check_query(request.query, "wait_ms")
    wait_ms = number_of(request.query, "wait_ms", 0, MAX_WAIT_MS)
    record = None
    if wait_ms:
        async with gateway.watchers.lent(tenant):
            settled = gateway.registration.settled(tenant.name, name, Deadline.after_ms(wait_ms))
            record = await gateway.departure.before(settled)
    return json_answer(template_view(record or await gateway.registration.get(tenant.name, name)))


async def listed(request: web.Request) -> web.Response:
    """The tenant's templates, page by page, the newest first."""
    limit, after = page_of(request.query)
    records = await request.app[GATEWAY].registration.of(request[TENANT].name)
    return json_answer(template_list(records, limit, after))


async def delete(request: web.Request) -> web.Response:
    """Forget a template, its picture and its recording."""
    name = request.match_info["template_id"]
    await request.app[GATEWAY].registration.delete(request[TENANT].name, name)
    return json_answer(TemplateDeleted(id=name))
