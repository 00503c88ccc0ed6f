"""A gateway inside the browser, for what a real one does too seldom or too quickly: it answers one page's requests.

The page's files are the package's own, and answers are made of the real gateway's models. A test that wants something
else in one place says so with ``page.route``, which comes first.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, urlsplit

import numpy as np
from playwright.async_api import Page, Route
from pydantic import BaseModel

import giornata_gateway
from giornata.families import Family
from giornata.wire.adapters import ControlCard
from giornata.wire.fleet import FleetView, InstanceView
from giornata.wire.jobs import JobState, Priority
from giornata.wire.loras import LoraState
from giornata.wire.masks import MaskCard
from giornata.wire.models import ModelCard, Task
from giornata.wire.requests import OutputFormat
from giornata.wire.values import StageTimes
from giornata.wire.workers import ServiceName
from giornata_gateway.http.body import frame
from giornata_gateway.views.answers import ErrorDetail
from giornata_gateway.views.catalog import model_list
from giornata_gateway.views.jobs import (
    KINDS,
    ControlShare,
    ErrorEvent,
    JobView,
    LoraShare,
    PartialImageEvent,
    PictureView,
)
from giornata_gateway.views.loras import LoraList, LoraView
from giornata_gateway.views.masks import MaskAnswer, RegionView
from tests.e2e.pictures import file, pixels
from tests.e2e.studio.browsing import Watch
from tests.fakes.fleet import CARD

ORIGIN: Final = "http://studio.test"
STATIC: Final = Path(giornata_gateway.__file__).parent / "static"
JOB: Final = "job-1"
SIDE: Final = 256
"""Side of the pictures that the gateway finishes, in pixels."""
STREAM: Final = "text/event-stream"
GREY: Final = (120, 120, 120)
BLUE: Final = (20, 20, 220)
GREEN: Final = (20, 220, 20)
RED: Final = (200, 30, 30)


def plain(color: tuple[int, int, int], side: int = SIDE) -> bytes:
    """A picture of one colour, as a PNG."""
    return file(np.full((side, side, 3), color, np.uint8))


FILL: Final = CARD.model_copy(update={"native_size": SIDE})
"""A model that edits only."""
PAINTER: Final = FILL.model_copy(
    update={
        "name": "painter",
        "family": Family.FLUX_INPAINT,
        "tasks": (Task.EDIT, Task.GENERATE),
        "generation_guidance_scale": 3.5,
    }
)
"""One that also generates."""


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
    slo_met: bool | None = None
    accepts: asyncio.Event = field(default_factory=asyncio.Event)
    """While it is not set, an edit that is sent has no answer yet."""
    ends: asyncio.Event = field(default_factory=asyncio.Event)
    masks: Mapping[str, MaskCard] = field(default_factory=dict)
    """What makes masks from words, by model."""
    found: Sequence[bytes] | ErrorDetail = ()
    """What it finds, a PNG for each thing, or why not, once `accepts` is set."""
    named: list[bytes] = field(default_factory=list)
    """Bodies of the requests for masks."""
    forms: list[bytes] = field(default_factory=list)
    """Bodies of the edits that were sent."""
    files: list[bytes] = field(default_factory=list)
    """Bodies of the uploads of LoRAs."""
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.accepts.set()
        self.ends.set()

    async def serve(self, route: Route) -> None:
        """Answer a request."""
        path = urlsplit(route.request.url).path
        if path == "/":
            await route.fulfill(path=STATIC / "index.html")
        elif path.startswith("/studio/"):
            await route.fulfill(path=STATIC / path.removeprefix("/studio/"))
        elif path == "/v1/models":
            cards = {card.name: card for card in self.models}
            await _json(route, model_list(cards, self.controlnets, self.masks))
        elif path == "/v1/fleet":
            await route.fulfill(body=frame("fleet", self.fleet), content_type=STREAM)
        elif path == "/v1/masks":
            await self._mask(route)
        elif path.startswith("/v1/loras"):
            await self._lora(route, path)
        else:
            await self._job(route, path)

    async def _mask(self, route: Route) -> None:
        self.named.append(route.request.post_data_buffer or b"")
        await self.accepts.wait()
        if isinstance(self.found, ErrorDetail):
            error = ErrorEvent(error=self.found).model_dump_json()
            await route.fulfill(status=422, body=error, content_type="application/json")
        else:
            await _json(route, masks_of(self.found))

    async def _lora(self, route: Route, path: str) -> None:
        if route.request.method == "POST":
            assert self.uploaded is not None
            self.files.append(route.request.post_data_buffer or b"")
            await _json(
                route, self.uploaded.model_copy(update={"state": LoraState.VALIDATING, "error": None})
            )
        elif path == "/v1/loras":
            asked = parse_qs(urlsplit(route.request.url).query)
            ids = [one.id for one in self.loras]
            first = ids.index(asked["after"][0]) + 1 if "after" in asked else 0
            last = first + self.page
            await _json(route, LoraList(data=self.loras[first:last], has_more=last < len(ids)))
        elif self.uploaded is not None and path.endswith(self.uploaded.id):
            await self.checks.wait()
            await _json(route, self.uploaded)
        else:
            await _json(route, next(one for one in self.loras if path.endswith(one.id)))

    async def _job(self, route: Route, path: str) -> None:
        if route.request.method == "POST":
            self.forms.append(route.request.post_data_buffer or b"")
            await self.accepts.wait()
        elif route.request.method == "DELETE":
            self.cancelled = True
            self.ends.set()
        elif path.endswith("/events"):
            await route.fulfill(body=self.events, content_type=STREAM)
            return
        elif path.endswith("/image"):
            await route.fulfill(body=plain((200, 30, 30)), content_type="image/png")
            return
        else:
            await self.ends.wait()
        await _json(route, self._status())

    def _status(self) -> JobView:
        return JobView(
            id=f"job-{max(1, len(self.forms))}",
            object=KINDS[Task.EDIT].job,
            state=JobState.CANCELLED if self.cancelled else JobState.COMPLETED,
            priority=Priority.INTERACTIVE,
            cancelling=False,
            model="tiny",
            attempt=1,
            steps=4,
            size=f"{SIDE}x{SIDE}",
            stage_ms=StageTimes(),
            slo_met=self.slo_met,
            loras=self.used[0],
            controlnets=self.used[1],
            pictures=[
                PictureView(
                    index=i,
                    seed=40 + i,
                    loras_from=self.loras_from,
                    error=self.failures.get(i),
                )
                for i in range(self.pictures)
            ],
        )


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


async def _json(route: Route, body: BaseModel) -> None:
    await route.fulfill(body=body.model_dump_json(), content_type="application/json")


Open = Callable[[FakeGateway], AbstractAsyncContextManager[tuple[Page, Watch]]]
"""Opens the page of a gateway."""
