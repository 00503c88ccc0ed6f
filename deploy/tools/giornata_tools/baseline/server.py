"""The queue of rows, the one thread that computes them, and the HTTP server around both."""

from __future__ import annotations

import asyncio
import base64
import io
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from aiohttp import web
from PIL import Image

from giornata.wire.errors import GiornataError, InternalError, InvalidField, ModelNotFound, QueueFull
from giornata_gateway.views.answers import ErrorAnswer, error_detail
from giornata_tools.baseline.batching import Rule, Waiting, next_batch
from giornata_tools.baseline.forms import Form, read_form, read_image, read_mask, size_of
from giornata_tools.baseline.pipeline import Alike, Row

MAX_BODY: Final = 64 << 20
"""Bytes of a request."""


class Paints(Protocol):
    """A pipeline."""

    name: str

    def paint(self, rows: Sequence[Row], alike: Alike) -> list[Image.Image]:
        """One batch."""
        ...


@dataclass(frozen=True)
class Painted:
    """A row's picture, and how it came about."""

    picture: Image.Image
    batch: int
    """Rows of its batch."""
    place: int
    """Its own among them."""
    waiting_ms: float
    computing_ms: float


@dataclass(eq=False)
class Queued:
    """A row, its place in the queue, and where its picture goes."""

    row: Row
    place: Waiting
    painted: asyncio.Future[Painted] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Baseline:
    """Static batching over a pipeline.

    Args:
        pipeline: paints.
        rule: when a batch begins.
        most: rows that may wait; more are refused.
    """

    def __init__(self, pipeline: Paints, rule: Rule, most: int) -> None:
        self._pipeline, self._rule, self._most = pipeline, rule, most
        self._queue: list[Queued] = []
        self._changed = asyncio.Event()

    async def painted(self, rows: Sequence[Row], alike: Alike) -> list[Painted]:
        """The rows' pictures; a caller that is cancelled takes the ones that still wait along.

        Raises:
            QueueFull: too many wait.
        """
        if len(self._queue) + len(rows) > self._most:
            raise QueueFull(retry_after_s=1.0)
        queued = [Queued(row, Waiting(alike, time.monotonic())) for row in rows]
        self._queue += queued
        self._changed.set()
        try:
            return list(await asyncio.gather(*(one.painted for one in queued)))
        finally:
            self._queue = [one for one in self._queue if one not in queued]

    async def run(self) -> None:
        """Compute batches, one after the other, until cancelled."""
        while True:
            self._changed.clear()
            now = time.monotonic()
            places = next_batch([one.place for one in self._queue], self._rule, now)
            if places:
                batch = [self._queue[place] for place in places]
                self._queue = [one for one in self._queue if one not in batch]
                await self._compute(batch)
                continue
            first = min((one.place.since for one in self._queue), default=None)
            left = None if first is None else first + self._rule.window_s - now
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()

    async def _compute(self, batch: Sequence[Queued]) -> None:
        began = time.monotonic()
        alike = batch[0].place.alike
        assert isinstance(alike, Alike)  # noqa: S101 - `painted` says so; this tells the type
        rows = [one.row for one in batch]
        try:
            pictures = await asyncio.to_thread(self._pipeline.paint, rows, alike)
        except Exception as error:  # noqa: BLE001 - whatever the pipeline says, these requests are told and the next go on
            for one in batch:
                if not one.painted.done():
                    one.painted.set_exception(
                        InternalError(f"The pipeline failed: {type(error).__name__}: {error}")
                    )
            return
        took = (time.monotonic() - began) * 1000
        for place, (one, picture) in enumerate(zip(batch, pictures, strict=True)):
            if not one.painted.done():
                waited = (began - one.place.since) * 1000
                one.painted.set_result(Painted(picture, len(batch), place, waited, took))


@asynccontextmanager
async def serving(baseline: Baseline, name: str, host: str, port: int) -> AsyncIterator[str]:
    """The server, listening while inside; gives its address. `port` 0 is any free one."""
    app = web.Application(client_max_size=MAX_BODY)
    app.router.add_post("/v1/images/edits", partial(_answered, baseline, name))
    app.router.add_get("/v1/models", partial(_models, name))
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    async with asyncio.TaskGroup() as group:
        computing = group.create_task(baseline.run())
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            yield f"http://{host}:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()
            computing.cancel()


async def _models(name: str, _: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": name, "object": "model", "created": 0}]})


async def _answered(baseline: Baseline, name: str, request: web.Request) -> web.Response:
    try:
        return await _edit(baseline, name, request)
    except GiornataError as error:
        body = ErrorAnswer(error=error_detail(error.body()))
        return web.json_response(text=body.model_dump_json(), status=error.status)


async def _edit(baseline: Baseline, name: str, request: web.Request) -> web.Response:
    form, files = await _read(request)
    if form.model not in {None, name}:
        raise ModelNotFound(field="model", received=form.model, accepted=name)
    image = await asyncio.to_thread(read_image, files["image"])
    mask = await asyncio.to_thread(read_mask, files.get("mask"), files["image"])
    width, height = size_of(form, image)
    alike = Alike(width, height, form.num_inference_steps, form.guidance_scale, form.strength)
    seed = secrets.randbits(31) if form.seed is None else form.seed
    rows = [Row(form.prompt, image, mask, (seed + index) % 2**32) for index in range(form.n)]
    painted = await baseline.painted(rows, alike)
    pictures = await asyncio.to_thread(lambda: [_encoded(one.picture) for one in painted])
    return web.json_response(
        {
            "created": int(time.time()),
            "data": [{"b64_json": picture} for picture in pictures],
            "output_format": "png",
            "size": f"{painted[0].picture.width}x{painted[0].picture.height}",
            "static_batching": [
                {
                    "seed": row.seed,
                    "batch": one.batch,
                    "place": one.place,
                    "waiting_ms": round(one.waiting_ms, 1),
                    "computing_ms": round(one.computing_ms, 1),
                }
                for row, one in zip(rows, painted, strict=True)
            ],
        }
    )


async def _read(request: web.Request) -> tuple[Form, dict[str, bytes]]:
    """A request's form and its files."""
    try:
        posted = await request.post()
    except ValueError as error:
        raise InvalidField("The body is no form.", received=request.content_type) from error
    parts = [(name, part) for name, part in posted.items() if isinstance(part, web.FileField)]
    files = {name.removesuffix("[]"): _content(part) for name, part in parts}
    fields = [(name, value) for name, value in posted.items() if isinstance(value, str)]
    if unknown := files.keys() - {"image", "mask"}:
        raise InvalidField(field=min(unknown), received="a file", accepted="image and mask")
    if "image" not in files:
        raise InvalidField("An edit needs a picture.", field="image", received="no image", accepted="a file")
    return read_form(fields), files


def _content(part: web.FileField) -> bytes:
    with part.file as file:
        return file.read()


def _encoded(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
