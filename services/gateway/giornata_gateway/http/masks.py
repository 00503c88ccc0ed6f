"""``/v1/masks``: what words name in a picture, before or without an edit."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

from aiohttp import web

from giornata.deadlines import Deadline
from giornata_gateway.gateway import Gateway
from giornata_gateway.http.body import JSON_COPIES, room, send
from giornata_gateway.http.errors import GATEWAY, TENANT
from giornata_gateway.http.uploads import read_upload
from giornata_gateway.intake.rules.idempotency import HEADER
from giornata_gateway.intake.rules.mask_forms import MaskFormat, check_no_key, read_mask_form
from giornata_gateway.jobs.masks import StandaloneMask
from giornata_gateway.views.masks import mask_answer


async def make(request: web.Request) -> web.StreamResponse:
    """Find what words name, and answer with the masks. It counts as a picture, and nothing of it is kept."""
    gateway, tenant = request.app[GATEWAY], request[TENANT]
    check_no_key(request.headers, HEADER)
    gateway.places.check(tenant)
    gateway.quotas.check(tenant)
    deadline = Deadline.after_ms(gateway.config.budget_s * 1000)
    async with AsyncExitStack() as held:
        with gateway.uploads.growing(tenant) as grow:
            upload = await read_upload(request, grow)
            form = read_mask_form(upload, request.headers.get("Accept", ""))
            shown = await held.enter_async_context(gateway.shown(tenant, form, upload.picture, deadline))
            del upload
        return await _answer(request, gateway, shown, form.response_format)


async def _answer(
    request: web.Request, gateway: Gateway, shown: StandaloneMask, form: MaskFormat
) -> web.StreamResponse:
    reply, whole = shown.reply, form is MaskFormat.IMAGE
    refs = [reply.mask] if whole else shown.pictures
    size_bytes = sum(ref.size_bytes for ref in refs)
    async with room(request, size_bytes * (1 if whole else JSON_COPIES)):
        pngs = {ref.key: await gateway.blobs.get(ref) for ref in refs}
        if whole:
            return await send(request, pngs[reply.mask.key], "image/png", {})
        now = int(time.time())
        body = await asyncio.to_thread(lambda: mask_answer(reply, pngs, now).model_dump_json().encode())
        pngs.clear()
        return await send(request, body, "application/json", {})
