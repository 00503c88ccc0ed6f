"""``/v1/loras``: adapters that are uploaded once and named by edits."""

from __future__ import annotations

from typing import Final

from aiohttp import hdrs, web

from giornata.deadlines import Deadline
from giornata.wire.loras import PIECE_BYTES
from giornata_gateway.http.errors import GATEWAY, TENANT, json_answer
from giornata_gateway.http.lora_uploads import receive_lora
from giornata_gateway.http.requests import base_path, check_query, number_of, page_of
from giornata_gateway.http.templates import MAX_WAIT_MS
from giornata_gateway.http.uploads import BUFFER_BYTES
from giornata_gateway.views.loras import LoraDeleted, lora_list, lora_view

HELD_BYTES: Final = BUFFER_BYTES + 3 * PIECE_BYTES
"""What an upload holds: a piece that fills, one on its way, and its message."""


async def upload(request: web.Request) -> web.Response:
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


async def status(request: web.Request) -> web.Response:
    """How far a LoRA is; with `wait_ms`, once it is ready or has failed, at the latest after that time."""
    gateway, tenant, name = request.app[GATEWAY], request[TENANT], request.match_info["lora_id"]
    check_query(request.query, "wait_ms")
    wait_ms = number_of(request.query, "wait_ms", 0, MAX_WAIT_MS)
    record = None
    if wait_ms:
        async with gateway.watchers.lent(tenant):
            settled = gateway.loras.settled(tenant.name, name, Deadline.after_ms(wait_ms))
            record = await gateway.departure.before(settled)
    return json_answer(lora_view(record or await gateway.loras.get(tenant.name, name)))


async def listed(request: web.Request) -> web.Response:
    """The LoRAs that the tenant may use, page by page, the newest first."""
    limit, after = page_of(request.query)
    records = await request.app[GATEWAY].loras.of(request[TENANT].name)
    return json_answer(lora_list(records, limit, after))


async def pin(request: web.Request) -> web.Response:
    """Have every host keep a LoRA of the tenant's own: PUT; DELETE no longer."""
    name, pinned = request.match_info["lora_id"], request.method == hdrs.METH_PUT
    record = await request.app[GATEWAY].loras.pin(request[TENANT].name, name, pinned=pinned)
    return json_answer(lora_view(record))


async def delete(request: web.Request) -> web.Response:
    """Forget a LoRA of the tenant's own."""
    name = request.match_info["lora_id"]
    await request.app[GATEWAY].loras.delete(request[TENANT].name, name)
    return json_answer(LoraDeleted(id=name))
