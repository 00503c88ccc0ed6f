"""Masks, templates, webhooks and LoRAs; health, readiness, metrics, models, instances; the document and the pages."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from importlib.resources import files
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

import nats.errors
from aiohttp import hdrs, web
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.lora_files import open_upload
from giornata.wire.errors import GiornataError, InvalidField, ServiceUnavailable
from giornata.wire.loras import PIECE_BYTES, LoraRecord
from giornata.wire.requests import asked
from giornata.wire.workers import FleetView, InstanceReport
from giornata_gateway.fleet import FleetListener, find_card
from giornata_gateway.gateway import Gateway
from giornata_gateway.http.requests import (
    BUFFER_BYTES,
    FORM,
    FormReader,
    check_query,
    number_of,
    read_upload,
    receiving,
)
from giornata_gateway.http.responses import (
    EVENT_STREAM,
    GATEWAY,
    TENANT,
    base_path,
    frame,
    json_answer,
    looking_on,
    send_pictures,
    write,
)
from giornata_gateway.jobs.preparation import HEADER
from giornata_gateway.rules.forms import (
    LoraForm,
    MaskFormat,
    check_no_key,
    once_each,
    read_mask_form,
    read_template_form,
)
from giornata_gateway.views.catalog import (
    HealthView,
    ModelList,
    fleet_view,
    model_list,
    ready_view,
    tenant_view,
)
from giornata_gateway.views.jobs import View
from giornata_gateway.views.resources import (
    DeletedResource,
    ListPage,
    LoraDeleted,
    LoraList,
    MaskAnswer,
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
    async with AsyncExitStack() as held:
        with gateway.receiving(tenant) as grow:
            deadline = Deadline.after_ms(gateway.config.budget_s * 1000)
            upload = await read_upload(request, grow)
            form = read_mask_form(upload, request.headers.get("Accept", ""))
            shown = await held.enter_async_context(gateway.shown(tenant, form, upload.picture, deadline))
            del upload
        keys, now = [ref.key for ref in shown.pictures], int(time.time())

        def told(pngs: Sequence[bytes]) -> MaskAnswer:
            return mask_answer(shown.reply, dict(zip(keys, pngs, strict=True)), now)

        answer = "image/png" if form.response_format is MaskFormat.IMAGE else told
        return await send_pictures(request, shown.pictures, {}, answer, gateway.blobs.get)


MAX_WAIT_MS: Final = 60_000
MAX_PAGE: Final = 100
DEFAULT_PAGE: Final = 20


class OwnedRoutes(NamedTuple):
    """The routes that every kind of a tenant's records has."""

    name: str
    """The field, and the part of the path, that holds the id."""
    kept: Callable[[Gateway], Any]
    """What keeps them, by tenant and id: it has `get`, `of`, `delete`, and `settled` where it tells how far one is."""
    view: Callable[[Any], View]
    listed: type[ListPage[Any]]
    deleted: Callable[..., DeletedResource]

    async def status(self, request: web.Request) -> web.Response:
        """How far one is; with `wait_ms`, once it is settled, at the latest after that time."""
        gateway = request.app[GATEWAY]
        check_query(request.query, "wait_ms")
        wait_ms = number_of(request.query, "wait_ms", 0, MAX_WAIT_MS)
        kept, whose, found = self.kept(gateway), self._whose(request), None
        if wait_ms:
            async with gateway.watchers.lent(request[TENANT]):
                waited = kept.settled(*whose, Deadline.after_ms(wait_ms))
                found = await gateway.departure.before(waited)
        return json_answer(self.view(found or await kept.get(*whose)))

    async def list(self, request: web.Request) -> web.Response:
        """The tenant's own, and those that it may use, page by page, the newest first."""
        query = request.query
        check_query(query, "limit", "after")
        limit, after = number_of(query, "limit", DEFAULT_PAGE, MAX_PAGE, least=1), query.get("after")
        records = await self.kept(request.app[GATEWAY]).of(request[TENANT].name)
        return json_answer(page(self.listed, self.view, records, self.name, limit=limit, after=after))

    async def delete(self, request: web.Request) -> web.Response:
        """Forget one of the tenant's own."""
        tenant, name = self._whose(request)
        await self.kept(request.app[GATEWAY]).delete(tenant, name)
        return json_answer(self.deleted(id=name))

    def _whose(self, request: web.Request) -> tuple[str, str]:
        return request[TENANT].name, request.match_info[self.name]


TEMPLATES: Final = OwnedRoutes(
    "template_id", attrgetter("registration"), template_view, TemplateList, TemplateDeleted
)
LORAS: Final = OwnedRoutes("lora_id", attrgetter("loras"), lora_view, LoraList, LoraDeleted)
WEBHOOKS: Final = OwnedRoutes("job_id", attrgetter("webhooks"), webhook_view, WebhookList, WebhookDeleted)


async def register_template(request: web.Request) -> web.Response:
    """Register a template: 202 with its state and its Location, once a worker records it."""
    gateway, tenant = request.app[GATEWAY], request[TENANT]
    with gateway.receiving(tenant) as grow:
        upload = await read_upload(request, grow)
        form = read_template_form(upload)
        budget_s = gateway.config.budget_s
        with gateway.stay(tenant, 1, f"registration_{secrets.token_urlsafe(9)}", budget_s):
            deadline = Deadline.after_ms(budget_s * 1000)
            record = await gateway.registration.register(tenant.name, upload.picture, form, deadline)
    location = f"{base_path(request)}/v1/templates/{record.template_id}"
    return json_answer(template_view(record), status=202, headers={"Location": location})


async def retry_webhook(request: web.Request) -> web.Response:
    """Send a webhook that was given up again; another one stays as it is."""
    job_id = request.match_info["job_id"]
    return json_answer(webhook_view(await request.app[GATEWAY].webhooks.again(request[TENANT].name, job_id)))


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
        model = gateway.fleet.choose(form.model).name
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
    with gateway.receiving(tenant, counted=False) as grow:
        async with grow.receiving():
            grow(HELD_BYTES)
            await gateway.loras.check_room(tenant.name)
            record = await receive_lora(request)
    location = f"{base_path(request)}/v1/loras/{record.lora_id}"
    return json_answer(lora_view(record), status=202, headers={"Location": location})


async def pin_lora(request: web.Request) -> web.Response:
    """Have every host keep a LoRA of the tenant's own: PUT; DELETE no longer."""
    name, pinned = request.match_info["lora_id"], request.method == hdrs.METH_PUT
    record = await request.app[GATEWAY].loras.pin(request[TENANT].name, name, pinned=pinned)
    return json_answer(lora_view(record))


CHECK_S: Final = 2.0
"""A dependency that takes longer to answer counts as gone."""
PERIOD_S: Final = 0.5
"""Between two events of the fleet's live stream; telemetry comes 2-4 times a second."""
FLEET_EVENT: Final = "fleet"
"""Name of the events of that stream."""
DOCUMENT: Final = web.AppKey("document", dict)
"""The OpenAPI document, made when the gateway starts."""


async def healthz(request: web.Request) -> web.Response:
    """200 while this process, its NATS connection and its blob store answer; else 503."""
    gateway = request.app[GATEWAY]
    blobs = asyncio.wait_for(gateway.blobs.ping(), CHECK_S)
    nats_state, blobs_state = await asyncio.gather(_state(_flushed(gateway.bus)), _state(blobs))
    view = HealthView(healthy=nats_state == blobs_state == "ok", nats=nats_state, blobs=blobs_state)
    return _state_answer(view, good=view.healthy)


async def readyz(request: web.Request) -> web.Response:
    """200 while an edit would be carried out: services are ready and stores take writes; else 503."""
    gateway = request.app[GATEWAY]
    draining = gateway.departure.announced.is_set()
    known = gateway.fleet
    full = {store: str(error) for store, error in (await gateway.storage.full()).items()}
    view = ready_view(known.cards(), known.missing(), known.nearly_full(), full, draining=draining)
    return _state_answer(view, good=view.ready)


async def metrics(request: web.Request) -> web.Response:
    """Prometheus' text format."""
    gateway = request.app[GATEWAY]
    await gateway.storage.full()
    body = gateway.metrics.exposition(await gateway.fleet.reports(gateway.bus) or (), gateway.fleet.waits_s())
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def models(request: web.Request) -> web.Response:
    """Models that can be asked for."""
    return json_answer(_models(request.app[GATEWAY].fleet))


async def model(request: web.Request) -> web.Response:
    """The model of a name or an alias; ModelNotFound tells the names there are."""
    fleet = request.app[GATEWAY].fleet
    named = find_card(request.match_info["model"], fleet.cards(), fleet.aliases).name
    return json_answer(next(one for one in _models(fleet).data if one.id == named))


def _models(fleet: FleetListener) -> ModelList:
    return model_list(fleet.cards(), fleet.controlnets(), fleet.masks(), fleet.aliases)


class FleetFrames:
    """Events of the fleet's live streams: each is made once for all streams that tell the same."""

    def __init__(self) -> None:
        self._reports: Sequence[InstanceReport] | None = None
        self._made: dict[int | None, bytes] = {}

    def of(self, reports: Sequence[InstanceReport] | None, own_rows: int | None) -> bytes:
        """The event of `reports` as :func:`_view` shows them; it is made again when they are others."""
        if reports is not self._reports:
            self._reports, self._made = reports, {}
        made = self._made.get(own_rows) or frame(FLEET_EVENT, _view(reports, own_rows))
        return self._made.setdefault(own_rows, made)


FRAMES: Final = web.AppKey("fleet_frames", FleetFrames)


async def fleet(request: web.Request) -> web.StreamResponse:
    """Every live instance and their sums, or what a tenant may know; again and again where an event stream is asked."""
    gateway, tenant = request.app[GATEWAY], request[TENANT]

    async def known() -> tuple[list[InstanceReport] | None, int | None]:
        return await gateway.fleet.reports(
            gateway.bus
        ), None if tenant.operator else gateway.quotas.in_progress(tenant)

    accepted = request.headers.get("Accept", "").split(",", maxsplit=1)[0].partition(";")[0]
    if accepted.strip().lower() != "text/event-stream":
        return json_answer(_view(*await known()))
    response = web.StreamResponse(headers=EVENT_STREAM)
    async with looking_on(request, response):
        await response.prepare(request)
        while not gateway.departure.begun.is_set():
            await write(request, response, request.app[FRAMES].of(*await known()))
            await asyncio.sleep(PERIOD_S)  # the rate of the stream, not a poll
    return response


def _view(reports: Sequence[InstanceReport] | None, own_rows: int | None) -> FleetView:
    """All of `reports` for an operator; a tenant has `own_rows` pictures in progress, and sees less."""
    return fleet_view(reports) if own_rows is None else tenant_view(reports, own_rows)


async def openapi(request: web.Request) -> web.Response:
    """This API, from the table that serves it and the types that validate it."""
    return web.json_response(request.app[DOCUMENT] | {"servers": [{"url": base_path(request) or "/"}]})


def _state_answer(view: BaseModel, *, good: bool) -> web.Response:
    return json_answer(view, status=200 if good else 503, headers=None if good else {"Retry-After": "1"})


async def _flushed(bus: Bus) -> None:
    if not bus.client.is_connected:
        raise ServiceUnavailable("not connected")
    await bus.client.flush(timeout=int(CHECK_S))


async def _state(check: Awaitable[None]) -> str:
    """`ok`, or what is wrong."""
    try:
        await check
    except TimeoutError:
        return "does not answer in time"
    except GiornataError as error:
        return error.message
    except (nats.errors.Error, OSError) as error:
        return f"does not answer: {type(error).__name__}"
    return "ok"


CONTENT_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".jpg": "image/jpeg",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".md": "text/markdown; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".webp": "image/webp",
}
"""Content types by suffix; a file with another suffix is not served."""

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""Nothing comes from elsewhere, nothing is inline, and no text becomes markup."""


class Asset(NamedTuple):
    """One file as it is answered."""

    body: bytes
    content_type: str
    etag: str


ASSETS: Final = web.AppKey("assets", Mapping[str, Asset])


def load_assets() -> Mapping[str, Asset]:
    """Every file of ``static/`` by its path there."""
    static = Path(str(files("giornata_gateway"))) / "static"
    served: dict[str, Asset] = {}
    for path in static.rglob("*"):
        if path.suffix in CONTENT_TYPES:
            body = path.read_bytes()
            etag = hashlib.sha256(body).hexdigest()[:32]
            served[path.relative_to(static).as_posix()] = Asset(body, CONTENT_TYPES[path.suffix], etag)
    return served


async def asset(request: web.Request, page: str = "") -> web.Response:
    """A `page`, or the part of pages that ``/studio/{path}`` names."""
    found = request.app[ASSETS].get(page or request.match_info["path"])
    if found is None:
        raise web.HTTPNotFound
    headers = {
        "ETag": f'"{found.etag}"',
        "Cache-Control": "no-cache",
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
    }
    if any(tag.value in {found.etag, "*"} for tag in request.if_none_match or ()):
        return web.Response(status=304, headers=headers)
    return web.Response(body=found.body, headers=headers | {"Content-Type": found.content_type})


PAGES: Final = (
    web.get("/", partial(asset, page="index.html")),
    web.get("/docs", partial(asset, page="docs.html")),
    web.get("/studio/{path:.+}", asset),
)
"""The studio, on which a person edits, the OpenAPI document as a page, and what both are made of."""
