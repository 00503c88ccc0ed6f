"""A gateway without a system behind it, for what a real one does too seldom or too quickly: it answers one page.

The page's files and their policy, the readers of forms, the errors and the answers are the real gateway's own: a form
that it would refuse is refused here. A test that wants something else in one place says so with ``page.route``.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final, cast

import numpy as np
from aiohttp import web
from playwright.async_api import Page

from giornata.shares import SharedPool
from giornata.wire.adapters import CONTROL_IMAGES, ControlCard
from giornata.wire.errors import GiornataError, Unauthorized
from giornata.wire.jobs import JobState, Priority
from giornata.wire.loras import LoraState
from giornata.wire.messages import MaskCard
from giornata.wire.models import ModelCard, Task
from giornata.wire.requests import REFERENCE, OutputFormat, asked
from giornata.wire.values import StageTimes
from giornata.wire.workers import FleetView, InstanceView, ServiceName
from giornata_gateway.admission import ByteReservation, Tenant
from giornata_gateway.config import GatewayConfig
from giornata_gateway.http import resources as studio
from giornata_gateway.http.requests import read_json, read_upload
from giornata_gateway.http.responses import EVENT_STREAM, GATEWAY, JSON, error_answer, frame, json_answer
from giornata_gateway.http.routes import document
from giornata_gateway.rules.forms import (
    GenerationJobForm,
    JobForm,
    LoraForm,
    RequestBody,
    check_source,
    decoded,
    in_order,
    picture,
    read_form,
    read_mask_form,
)
from giornata_gateway.views.catalog import model_list
from giornata_gateway.views.jobs import (
    KINDS,
    ControlShare,
    ErrorDetail,
    JobView,
    LoraShare,
    PartialImageEvent,
    PictureView,
)
from giornata_gateway.views.resources import LoraList, LoraView, MaskAnswer, RegionView
from giornata_lab.bench.systems.edit_forms import file, pixels
from tests.e2e.studio.browsing import Watch
from tests.fakes import fleet as fakes

JOB: Final = "job-1"
SIDE: Final = 256
"""Side of the pictures that the gateway finishes, in pixels."""
GREY: Final = (120, 120, 120)
BLUE: Final = (20, 20, 220)
GREEN: Final = (20, 220, 20)
RED: Final = (200, 30, 30)
ASSETS: Final = studio.load_assets()
DOCUMENT: Final = document()


def plain(color: tuple[int, int, int], side: int = SIDE) -> bytes:
    """A picture of one colour, as a PNG."""
    return file(np.full((side, side, 3), color, np.uint8))


FILL: Final = fakes.CARD.model_copy(update={"native_size": SIDE})
"""A model that edits only."""
PAINTER: Final = fakes.PAINTER.model_copy(update={"native_size": SIDE})
"""One that also generates."""
RESULT: Final = plain(RED)


def fleet(
    *models: str, running: int = 0, waiting: int = 0, queued: int = 0, wait_s: float = 0.0
) -> FleetView:
    """One ready worker for each model; rows in batches, rows taken, jobs of two pictures each that nobody has taken."""
    instances = [
        InstanceView(
            service=ServiceName.DENOISER,
            instance=f"denoiser-{name}",
            host="here",
            version="1",
            ready=True,
            draining=False,
            active=True,
            models=[name],
            running_rows=running,
            waiting_rows=waiting,
            worker=None,
        )
        for name in models
    ]
    return FleetView(
        instances=instances,
        workers=len(models),
        running_rows=running,
        waiting_rows=waiting,
        free_rows=8 - running - waiting,
        queued_jobs=queued,
        queued_rows=2 * queued,
        steps_per_s=2.5,
        predicted_wait_s=wait_s,
    )


def lora(
    number: int, name: str | None = None, state: LoraState = LoraState.READY, model: str = "tiny"
) -> LoraView:
    """A LoRA as the gateway tells it."""
    return LoraView(
        id=f"lora_{number:032x}",
        state=state,
        model=model,
        name=name,
        shared=False,
        pinned=False,
        style=None,
        rank=8,
        modules=4,
        text_modules=0,
        bytes=1000,
        joins_within=None,
        sha256=None,
        created_at=0,
    )


def preview(number: int, color: tuple[int, int, int]) -> bytes:
    """The event of a preview of the whole picture."""
    event = PartialImageEvent(
        type=KINDS[Task.EDIT].partial_image,
        b64_json=base64.b64encode(plain(color, 8)).decode(),
        partial_image_index=number,
        created_at=0,
        background="opaque",
        output_format=OutputFormat.PNG,
        quality="medium",
        size=f"{SIDE}x{SIDE}",
        index=0,
        job_id=JOB,
        step=number + 1,
        steps=4,
        box=(0, 0, SIDE, SIDE),
        media_type="image/png",
    )
    return frame(event.type, event, number + 1)


@dataclass(frozen=True)
class SentRequest:
    """What a page has sent, as the real gateway reads it."""

    fields: dict[str, Any]
    """Texts of a form, or values of a JSON object; no pictures."""
    body: RequestBody


@dataclass
class FakeGateway:
    """Every edit becomes a job, the first one :data:`JOB`, which ends when `ends` is set."""

    models: list[ModelCard] = field(default_factory=lambda: [FILL])
    fleet: FleetView = field(default_factory=lambda: fleet("tiny"))
    events: bytes = b""
    """The events of the job's stream."""
    failures: dict[int, ErrorDetail] = field(default_factory=dict)
    """By the index of the picture."""
    pictures: int = 1
    controlnets: Mapping[str, Sequence[ControlCard]] = field(default_factory=dict)
    """By model."""
    loras: list[LoraView] = field(default_factory=list)
    page: int = 100
    """Most LoRAs that an answer lists."""
    uploaded: LoraView | None = None
    """What a file becomes once `checks` is set; until then it is being validated."""
    checks: asyncio.Event = field(default_factory=asyncio.Event)
    used: tuple[list[LoraShare], list[ControlShare]] = field(default_factory=lambda: ([], []))
    """What the job tells of its adapters."""
    loras_from: int | None = None
    accepts: asyncio.Event = field(default_factory=asyncio.Event)
    """While it is not set, an edit that is sent has no answer yet."""
    ends: asyncio.Event = field(default_factory=asyncio.Event)
    masks: Mapping[str, MaskCard] = field(default_factory=dict)
    """What makes masks from words, by model."""
    found: Sequence[bytes] = ()
    """What it finds, a PNG for each thing, once `accepts` is set."""
    refusals: dict[str, GiornataError] = field(default_factory=dict)
    """By the path of a request, as long as they stand here."""
    key: str = ""
    """The API key that it wants."""
    named: list[SentRequest] = field(default_factory=list)
    """The requests for masks."""
    sent: list[SentRequest] = field(default_factory=list)
    """The edits and generations that were sent."""
    files: list[dict[str, Any]] = field(default_factory=list)
    """The uploads of LoRAs: fields, and the bytes of the file."""
    resumed: list[str] = field(default_factory=list)
    """After which events a job was followed on."""
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.accepts.set()
        self.ends.set()
        self._news = asyncio.Event()

    def become(self, **news: Any) -> None:
        """Change at once what is served and told; the fleet's stream tells it, or ends where it is refused now."""
        for name, value in news.items():
            setattr(self, name, value)
        self._news.set()
        self._news = asyncio.Event()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Listen on a free port while inside; yields the address."""
        app = web.Application(middlewares=[self._allow])
        app[GATEWAY] = cast("Any", SimpleNamespace(config=GatewayConfig()))
        app[studio.ASSETS] = ASSETS
        app.add_routes(
            [
                *studio.PAGES,
                web.get("/openapi.json", _document),
                web.get("/v1/models", self._models),
                web.get("/v1/fleet", self._fleet),
                web.post("/v1/masks", self._mask),
                web.get("/v1/loras", self._list_loras),
                web.post("/v1/loras", self._upload),
                web.get("/v1/loras/{lora}", self._lora),
                web.post("/v1/jobs", self._submit),
                web.get("/v1/jobs/{job}", self._job),
                web.delete("/v1/jobs/{job}", self._cancel),
                web.get("/v1/jobs/{job}/events", self._events),
                web.get("/v1/jobs/{job}/image", _image),
            ]
        )
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    @web.middleware
    async def _allow(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            if request.path in self.refusals:
                raise self.refusals[request.path]
            keyed = request.path.startswith("/v1/") and self.key
            if keyed and request.headers.get("Authorization") != f"Bearer {self.key}":
                raise Unauthorized("No API key.", accepted="a key")
            return await handler(request)
        except GiornataError as error:
            return error_answer(error)

    async def _models(self, _: web.Request) -> web.Response:
        cards = {card.name: card for card in self.models}
        return json_answer(model_list(cards, self.controlnets, self.masks))

    async def _fleet(self, request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse(headers=EVENT_STREAM)
        await stream.prepare(request)
        while request.path not in self.refusals:
            news = self._news
            await stream.write(frame("fleet", self.fleet))
            await news.wait()
        return stream

    async def _mask(self, request: web.Request) -> web.Response:
        body = await read_upload(request, _reservation())
        read_mask_form(body)
        self.named.append(SentRequest(dict(body.fields), body))
        await self.accepts.wait()
        return json_answer(masks_of(self.found))

    async def _list_loras(self, request: web.Request) -> web.Response:
        ids = [one.id for one in self.loras]
        first = ids.index(request.query["after"]) + 1 if "after" in request.query else 0
        last = first + self.page
        return json_answer(LoraList(data=self.loras[first:last], has_more=last < len(ids)))

    async def _upload(self, request: web.Request) -> web.Response:
        assert self.uploaded is not None
        told = await request.post()
        upload = {
            name: value.file.read() if isinstance(value, web.FileField) else value
            for name, value in told.items()
        }
        asked(LoraForm, {name: value for name, value in upload.items() if name != "file"})
        self.files.append(upload)
        return json_answer(
            self.uploaded.model_copy(update={"state": LoraState.VALIDATING, "error": None}), status=202
        )

    async def _lora(self, request: web.Request) -> web.Response:
        if self.uploaded is not None and self.uploaded.id == request.match_info["lora"]:
            await self.checks.wait()
            return json_answer(self.uploaded)
        return json_answer(next(one for one in self.loras if one.id == request.match_info["lora"]))

    async def _submit(self, request: web.Request) -> web.Response:
        if request.content_type == JSON:
            fields = await read_json(request, _reservation())
            controls = {name: picture(fields.pop(name), name) for name in CONTROL_IMAGES if name in fields}
            references = decoded(fields.pop(REFERENCE, []))
            read_form(GenerationJobForm, fields.items())
            sent = SentRequest(fields, RequestBody((), None, None, references, in_order(controls)))
        else:
            body = await read_upload(request, _reservation())
            check_source(body.image, None)
            read_form(JobForm, body.fields)
            sent = SentRequest(dict(body.fields), body)
        self.sent.append(sent)
        await self.accepts.wait()
        return json_answer(self._status(), status=202)

    async def _job(self, _: web.Request) -> web.Response:
        await self.ends.wait()
        return json_answer(self._status())

    async def _cancel(self, _: web.Request) -> web.Response:
        self.cancelled = True
        self.ends.set()
        return json_answer(self._status())

    async def _events(self, request: web.Request) -> web.Response:
        after = request.headers.get("Last-Event-ID")
        if after:
            self.resumed.append(after)
            return web.Response(status=204)
        return web.Response(body=self.events, headers=EVENT_STREAM)

    def _status(self) -> JobView:
        return JobView(
            id=f"job-{max(1, len(self.sent))}",
            object=KINDS[Task.EDIT].job,
            state=JobState.CANCELLED if self.cancelled else JobState.COMPLETED,
            priority=Priority.INTERACTIVE,
            cancelling=False,
            model="tiny",
            attempt=1,
            steps=4,
            size=f"{SIDE}x{SIDE}",
            stage_ms=StageTimes(),
            slo_met=None,
            loras=self.used[0],
            controlnets=self.used[1],
            pictures=[
                PictureView(index=i, seed=40 + i, loras_from=self.loras_from, error=self.failures.get(i))
                for i in range(self.pictures)
            ],
        )


async def _document(_: web.Request) -> web.Response:
    return web.json_response(DOCUMENT)


async def _image(_: web.Request) -> web.Response:
    return web.Response(body=RESULT, content_type="image/png")


def _reservation() -> ByteReservation:
    return ByteReservation(SharedPool(1 << 28), Tenant("studio"))


def masks_of(found: Sequence[bytes]) -> MaskAnswer:
    """The answer that tells these masks."""
    masks = [pixels(png) for png in found]
    regions = []
    for png, mask in zip(found, masks, strict=True):
        ys, xs = np.nonzero(mask)
        left, top = int(xs.min()), int(ys.min())
        box = (left, top, int(xs.max()) + 1 - left, int(ys.max()) + 1 - top)
        text = base64.b64encode(png).decode()
        regions.append(RegionView(score=0.9, box=box, area=len(xs), b64_png=text))
    together = np.maximum.reduce(masks)
    return MaskAnswer(
        created=0,
        model="seer",
        width=together.shape[1],
        height=together.shape[0],
        threshold=0.5,
        regions=regions,
        b64_png=base64.b64encode(file(together)).decode(),
    )


Open = Callable[..., AbstractAsyncContextManager[tuple[Page, Watch]]]
"""Opens the page of a gateway: the gateway, and options of the browser's context."""
