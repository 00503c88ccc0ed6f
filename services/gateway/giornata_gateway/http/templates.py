"""``/v1/templates``: pictures that are registered once and edited often."""

from __future__ import annotations

import secrets

from aiohttp import web

from giornata_gateway.http.edits import received_upload, tenant_of_request
from giornata_gateway.http.errors import GATEWAY, TENANT, json_answer
from giornata_gateway.views.templates import (
    DEFAULT_PAGE,
    MAX_PAGE,
    MAX_WAIT_MS,
    TemplateDeleted,
    check_query,
    query_number,
    read_template_form,
    template_list,
    template_view,
)


async def register(request: web.Request) -> web.Response:
    """Register a template: 202 with its state and its Location, once a worker records it."""
    gateway = request.app[GATEWAY]
    tenant = request[TENANT] = tenant_of_request(request)
    gateway.admission.check()
    gateway.quotas.check(tenant)
    with gateway.uploads.growing() as grow:
        upload = await received_upload(request, grow)
        form = read_template_form(upload)
        budget_s = gateway.config.budget_s
        with gateway.place(tenant, 1, f"registration_{secrets.token_urlsafe(9)}", budget_s):
            record = await gateway.registration.register(
                tenant.name, upload.picture, form, gateway.deadline(budget_s)
            )
    location = f"{gateway.config.public_url}/v1/templates/{record.template_id}"
    return json_answer(template_view(record), status=202, headers={"Location": location})


async def status(request: web.Request) -> web.Response:
    """How far a template is; with `wait_ms`, once it is recorded or could not be, at the latest after that time."""
    gateway = request.app[GATEWAY]
    tenant, name = tenant_of_request(request).name, request.match_info["template_id"]
    check_query(request.query, "wait_ms")
    wait_ms = query_number(request.query, "wait_ms", 0, MAX_WAIT_MS)
    if not wait_ms:
        return json_answer(template_view(await gateway.registration.get(tenant, name)))
    with gateway.watching():
        settled = gateway.registration.settled(tenant, name, gateway.deadline(wait_ms / 1000))
        record = await gateway.departure.before(settled)
    return json_answer(template_view(record or await gateway.registration.get(tenant, name)))


async def listed(request: web.Request) -> web.Response:
    """The tenant's templates, page by page, the newest first."""
    tenant = tenant_of_request(request).name
    check_query(request.query, "limit", "after")
    limit = query_number(request.query, "limit", DEFAULT_PAGE, MAX_PAGE, least=1)
    records = await request.app[GATEWAY].registration.of(tenant)
    return json_answer(template_list(records, limit, request.query.get("after")))


async def delete(request: web.Request) -> web.Response:
    """Forget a template, its picture and what was recorded of it."""
    tenant, name = tenant_of_request(request).name, request.match_info["template_id"]
    await request.app[GATEWAY].registration.delete(tenant, name)
    return json_answer(TemplateDeleted(id=name))
