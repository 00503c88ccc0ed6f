"""``/v1/masks``, ``/v1/templates``, ``/v1/webhooks`` and ``/v1/loras``."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import PurePosixPath
from typing import Final, TypeVar

from aiohttp import hdrs, web

from giornata.deadlines import Deadline
from giornata.lora_files import open_upload
from giornata.wire.errors import InvalidField
from giornata.wire.loras import PIECE_BYTES, LoraRecord
from giornata.wire.requests import asked
from giornata_gateway.gateway import Gateway
from giornata_gateway.http.requests import base_path, check_query, number_of, page_of
from giornata_gateway.http.responses import GATEWAY, JSON_COPIES, TENANT, json_answer, room, send
from giornata_gateway.http.uploads import BUFFER_BYTES, FORM, FormReader, read_upload, receiving
from giornata_gateway.jobs.preparation import StandaloneMask
from giornata_gateway.rules.forms import (
    LoraForm,
    MaskFormat,
    check_no_key,
    once_each,
    read_mask_form,
    read_template_form,
)
from giornata_gateway.rules.idempotency import HEADER
from giornata_gateway.views.resources import (
    LoraDeleted,
    LoraList,
    TemplateDeleted,
    TemplateList,
    WebhookDeleted,
    WebhookList,
    WebhookSecret,
    lora_view,
    mask_answer,
    page,
    template_view,
    webhook_view,
)


async def make_mask(request: web.Request) -> web.StreamResponse:
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


T = TypeVar("T")
MAX_WAIT_MS: Final = 60_000


async def register_template(request: web.Request) -> web.Response:
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


async def settled(
    request: web.Request, wait: Callable[[Deadline], Awaitable[T]], get: Callable[[], Awaitable[T]]
) -> T:
    """How far something is; with `wait_ms`, what `wait` finds, at the latest after that time."""
    gateway = request.app[GATEWAY]
    check_query(request.query, "wait_ms")
    wait_ms = number_of(request.query, "wait_ms", 0, MAX_WAIT_MS)
    found = None
    if wait_ms:
        async with gateway.watchers.lent(request[TENANT]):
            found = await gateway.departure.before(wait(Deadline.after_ms(wait_ms)))
    return found or await get()


async def template_status(request: web.Request) -> web.Response:
    """How far a template is."""
    kept, whose = request.app[GATEWAY].registration, (request[TENANT].name, request.match_info["template_id"])
    found = await settled(request, partial(kept.settled, *whose), partial(kept.get, *whose))
    return json_answer(template_view(found))


async def list_templates(request: web.Request) -> web.Response:
    """The tenant's templates, page by page, the newest first."""
    limit, after = page_of(request.query)
    records = await request.app[GATEWAY].registration.of(request[TENANT].name)
    return json_answer(page(TemplateList, template_view, records, "template_id", limit=limit, after=after))


async def delete_template(request: web.Request) -> web.Response:
    """Forget a template, its picture and its recording."""
    name = request.match_info["template_id"]
    await request.app[GATEWAY].registration.delete(request[TENANT].name, name)
    return json_answer(TemplateDeleted(id=name))


async def list_webhooks(request: web.Request) -> web.Response:
    """The tenant's webhooks that were not taken yet, page by page, the newest first."""
    limit, after = page_of(request.query)
    hooks = await request.app[GATEWAY].webhooks.of(request[TENANT].name)
    return json_answer(page(WebhookList, webhook_view, hooks, "job_id", limit=limit, after=after))


async def retry_webhook(request: web.Request) -> web.Response:
    """Send a webhook that was given up again; another one stays as it is."""
    job_id = request.match_info["job_id"]
    return json_answer(webhook_view(await request.app[GATEWAY].webhooks.again(request[TENANT].name, job_id)))


async def delete_webhook(request: web.Request) -> web.Response:
    """Send a webhook no more."""
    job_id = request.match_info["job_id"]
    await request.app[GATEWAY].webhooks.forget(request[TENANT].name, job_id)
    return json_answer(WebhookDeleted(id=job_id))


async def webhook_secret(request: web.Request) -> web.Response:
    """The secret by which the tenant's receivers know that a webhook is ours."""
    return json_answer(WebhookSecret(secret=request.app[GATEWAY].webhooks.secret(request[TENANT].name)))


FILE: Final = "file"
"""Name of the part with the file."""
MAX_NAME: Final = 200


async def receive_lora(request: web.Request) -> LoraRecord:
    """Send the file of a request on to the LoRA store, piece by piece; the LoRA that it becomes.

    The gateway never holds more than a few pieces of it.

    Raises:
        RequestTimeout: the client is too slow in sending it.
        BadRequest: it is not multipart/form-data, not well-formed, or ends early.
        InvalidField, UnknownField: a field is at fault, or the file is missing or given twice.
        ModelNotFound: no running worker serves the model.
        LoraUnreadable, LoraNotSupported, LoraTooLarge, LoraStoreFull: what the LoRA store says of the file.
    """
    gateway, tenant = request.app[GATEWAY], request[TENANT].name
    fields: list[tuple[str, str]] = []
    upload, filename = None, None
    async with AsyncExitStack() as stack:
        async with receiving(request, FORM, "a form with a file", gateway.config.lora_receive_s) as pace:
            reader = FormReader(request, pace, lambda _: None)
            while (found := await reader.part()) is not None:
                name, part = found
                if name != FILE:
                    fields.append((name, await reader.text(part, name)))
                    continue
                if upload is not None:
                    why = "A LoRA is exactly one file."
                    raise InvalidField(why, field=FILE, received="several", accepted="one file")
                with pace.elsewhere():
                    upload = await stack.enter_async_context(open_upload(gateway.bus, tenant))
                filename = part.filename
                while chunk := await reader.chunk(part):
                    with pace.elsewhere():
                        await upload.write(chunk)
        form = asked(LoraForm, once_each(fields))
        if upload is None:
            raise InvalidField("The file is missing.", field=FILE, accepted="one file of safetensors")
        model = gateway.loras.model(form.model)
        return await upload.finish(tenant, model, form.name or _stem(filename))


def _stem(filename: str | None) -> str | None:
    """A name for a file whose sender gives none, of its printable characters."""
    stem = PurePosixPath((filename or "").replace("\\", "/")).stem
    return "".join(character for character in stem if character.isprintable())[:MAX_NAME] or None


HELD_BYTES: Final = BUFFER_BYTES + 3 * PIECE_BYTES
"""What an upload holds: a piece that fills, one on its way, and its message."""


async def upload_lora(request: web.Request) -> web.Response:
    """Take a LoRA: 202 with its state and its Location, once its file is whole and its header accepted."""
    gateway, tenant = request.app[GATEWAY], request[TENANT]
    gateway.places.check(tenant)
    with gateway.uploads.growing(tenant) as grow:
        async with grow.receiving():
            grow(HELD_BYTES)
            await gateway.loras.check_room(tenant.name)
            record = await receive_lora(request)
    location = f"{base_path(request)}/v1/loras/{record.lora_id}"
    return json_answer(lora_view(record), status=202, headers={"Location": location})


async def lora_status(request: web.Request) -> web.Response:
    """How far a LoRA is."""
    kept, whose = request.app[GATEWAY].loras, (request[TENANT].name, request.match_info["lora_id"])
    return json_answer(
        lora_view(await settled(request, partial(kept.settled, *whose), partial(kept.get, *whose)))
    )


async def list_loras(request: web.Request) -> web.Response:
    """The LoRAs that the tenant may use, page by page, the newest first."""
    limit, after = page_of(request.query)
    records = await request.app[GATEWAY].loras.of(request[TENANT].name)
    return json_answer(page(LoraList, lora_view, records, "lora_id", limit=limit, after=after))


async def pin_lora(request: web.Request) -> web.Response:
    """Have every host keep a LoRA of the tenant's own: PUT; DELETE no longer."""
    name, pinned = request.match_info["lora_id"], request.method == hdrs.METH_PUT
    record = await request.app[GATEWAY].loras.pin(request[TENANT].name, name, pinned=pinned)
    return json_answer(lora_view(record))


async def delete_lora(request: web.Request) -> web.Response:
    """Forget a LoRA of the tenant's own."""
    name = request.match_info["lora_id"]
    await request.app[GATEWAY].loras.delete(request[TENANT].name, name)
    return json_answer(LoraDeleted(id=name))
