"""``/v1/webhooks``: those that were not taken yet, or were given up, and the secret that signs them."""

from __future__ import annotations

from aiohttp import web

from giornata_gateway.http.errors import GATEWAY, TENANT, json_answer
from giornata_gateway.http.requests import page_of
from giornata_gateway.views.webhooks import WebhookDeleted, WebhookSecret, webhook_list, webhook_view


async def listed(request: web.Request) -> web.Response:
    """The tenant's webhooks that were not taken yet, page by page, the newest first."""
    limit, after = page_of(request.query)
    hooks = await request.app[GATEWAY].webhooks.of(request[TENANT].name)
    return json_answer(webhook_list(hooks, limit, after))


async def again(request: web.Request) -> web.Response:
    """Send a webhook that was given up again; another one stays as it is."""
    job_id = request.match_info["job_id"]
    return json_answer(webhook_view(await request.app[GATEWAY].webhooks.again(request[TENANT].name, job_id)))


async def delete(request: web.Request) -> web.Response:
    """Send a webhook no more."""
    job_id = request.match_info["job_id"]
    await request.app[GATEWAY].webhooks.forget(request[TENANT].name, job_id)
    return json_answer(WebhookDeleted(id=job_id))


async def secret(request: web.Request) -> web.Response:
    """The secret by which the tenant's receivers know that a webhook is ours."""
    return json_answer(WebhookSecret(secret=request.app[GATEWAY].webhooks.secret(request[TENANT].name)))
