"""``/v1/masks``: what words name in a picture, before or without an edit."""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import AsyncExitStack

from aiohttp import web

from giornata.deadlines import Deadline
from giornata.wire.errors import NotSupported
from giornata.wire.masks import MaskReply
from giornata_gateway.gateway import Gateway
from giornata_gateway.http.body import JSON_COPIES, send
from giornata_gateway.http.errors import GATEWAY, TENANT
from giornata_gateway.http.uploads import read_upload
from giornata_gateway.intake.rules.idempotency import HEADER
from giornata_gateway.intake.rules.mask_forms import MaskFormat, read_mask_form
from giornata_gateway.views.masks import mask_answer


async def make(request: web.Request) -> web.StreamResponse:
    """Find what words name, and answer with the masks. It counts as a picture, and nothing of it is kept."""
    gateway, tenant = request.app[GATEWAY], request[TENANT]
    if HEADER in request.headers:
        raise NotSupported(
            "A mask is no job that a key could lead to.", field=HEADER, accepted="leave it out"
        )
    gateway.places.check()
    gateway.quotas.check(tenant)
    deadline = Deadline.after_ms(gateway.config.budget_s * 1000)
    async with AsyncExitStack() as held:
        with gateway.uploads.growing() as grow:
            upload = await read_upload(request, grow)
            form = read_mask_form(upload, request.headers.get("Accept", ""))
            name = f"mask_{secrets.token_urlsafe(9)}"
            held.enter_context(gateway.stay(tenant, 1, name, gateway.config.budget_s))
            shown = gateway.masks.shown(tenant.name, form.model, form.asked(), upload.picture, deadline)
            reply = await held.enter_async_context(shown)
            del upload
        return await _answer(request, gateway, reply, form.response_format)


async def _answer(
    request: web.Request, gateway: Gateway, reply: MaskReply, form: MaskFormat
) -> web.StreamResponse:
    whole = form is MaskFormat.IMAGE
    refs = [reply.mask, *(one.mask for one in reply.regions if one.mask is not None and not whole)]
    size_bytes = sum(ref.size_bytes for ref in refs)
    async with gateway.answers.room(size_bytes * (1 if whole else JSON_COPIES)):
        pngs = {ref.key: await gateway.blobs.get(ref) for ref in refs}
        if whole:
            return await send(request, pngs[reply.mask.key], "image/png", {})
        now = int(time.time())
        body = await asyncio.to_thread(lambda: mask_answer(reply, pngs, now).model_dump_json().encode())
        pngs.clear()
        return await send(request, body, "application/json", {})
