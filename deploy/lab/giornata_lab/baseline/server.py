"""The baseline's queue of rows, the one thread that computes them, and the HTTP server around both."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, TypeVar

import torch
from aiohttp import web
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from giornata.wire.errors import GiornataError, InternalError, InvalidField, ModelNotFound, QueueFull
from giornata.wire.requests import (
    MAX_IMAGES,
    MAX_SEED,
    MAX_STEPS,
    MaskMode,
    OutputSize,
    Prompt,
    request_error,
)
from giornata_gateway.views.jobs import ErrorAnswer, error_detail
from giornata_lab.baseline.pipeline import Pipeline, PipelineCallSettings, PipelineRow
from giornata_prepost.images.masks import edited_region
from giornata_prepost.images.pictures import decode
from giornata_tools.lora_profiler.probes import png


@dataclass(eq=False)
class BatchCandidate:
    """A row that waits."""

    alike: Hashable
    """Rows of one batch have equal ones."""
    since: float
    """Seconds of the caller's clock."""


@dataclass(frozen=True)
class BatchPolicy:
    """When a batch begins."""

    size: int
    """Most rows of a batch."""
    window_s: float
    """Longest wait of a row for others, while the pipeline is free."""


Row = TypeVar("Row", bound=BatchCandidate)


def next_batch(waiting: Sequence[Row], rule: BatchPolicy, now: float) -> list[Row]:
    """The rows of `waiting`, in the order of their arrival, that are computed now; none while they wait for others.

    The row that came first decides once its window is over, so that no kind of row waits for ever; before, the first
    batch that is full.
    """
    kinds: dict[Hashable, list[Row]] = {}
    for row in waiting:
        kinds.setdefault(row.alike, []).append(row)
    batches = [rows[: rule.size] for rows in kinds.values()]
    if waiting and now >= waiting[0].since + rule.window_s:
        return batches[0]
    return next((batch for batch in batches if len(batch) == rule.size), [])


MULTIPLE: Final = 16
"""Sides of computed pictures: Flux's token."""
MAX_PIXELS: Final = 4096 * 4096


class BaselineForm(BaseModel):
    """Fields of ``POST /v1/images/edits`` besides the files: OpenAI's, and diffusers' own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: Prompt
    model: str | None = None
    n: int = Field(1, ge=1, le=MAX_IMAGES)
    size: OutputSize = "auto"
    response_format: Literal["b64_json"] = "b64_json"
    num_inference_steps: int | None = Field(None, ge=1, le=MAX_STEPS)
    guidance_scale: float | None = Field(None, ge=0, le=100)
    strength: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=0, le=MAX_SEED)


def read_image(file: bytes) -> Image.Image:
    """The picture, upright and RGB, as diffusers loads it.

    Raises:
        BadRequest: as :func:`giornata_prepost.images.pictures.decode`.
    """
    return Image.fromarray(decode(file, MAX_PIXELS).pixels[..., :3])


def read_mask(file: bytes | None, image: bytes) -> Image.Image:
    """Return what is repainted, white, of mode L and the size of the file `image`: as the system has it by default.

    Raises:
        BadRequest: as :func:`giornata_prepost.images.masks.edited_region`.
    """
    marks = None if file is None else decode(file, MAX_PIXELS, "mask").pixels
    return Image.fromarray(edited_region(decode(image, MAX_PIXELS).pixels, marks, MaskMode.AUTO)).convert("L")


def size_of(form: BaselineForm, image: Image.Image) -> tuple[int, int]:
    """(width, height) that the pipeline computes: as asked for, or the image's, down to multiples of a token.

    Raises:
        InvalidField: as asked for, it is too small or too large.
    """
    width, height = image.size if form.size == "auto" else map(int, form.size.split("x"))
    if min(width, height) < MULTIPLE or width * height > MAX_PIXELS:
        raise InvalidField(
            field="size",
            received=f"{width}x{height}",
            accepted=f"sides from {MULTIPLE} pixels, {MAX_PIXELS} pixels at most",
        )
    return width // MULTIPLE * MULTIPLE, height // MULTIPLE * MULTIPLE


@dataclass(frozen=True)
class PaintedRow:
    """A row's picture, and how it came about."""

    picture: Image.Image
    batch: int
    """Rows of its batch."""
    place: int
    """The row's place among them."""
    waiting_ms: float
    computing_ms: float


@dataclass(eq=False)
class QueuedPipelineRow(BatchCandidate):
    """A row in the queue, and where its picture goes."""

    alike: PipelineCallSettings
    row: PipelineRow
    painted: asyncio.Future[PaintedRow] = field(default_factory=asyncio.Future)


class Baseline:
    """Static batching over a pipeline; more than `most` rows that wait are refused."""

    def __init__(self, pipeline: Pipeline, rule: BatchPolicy, most: int) -> None:
        self.name: Final = pipeline.name
        self._pipeline, self._rule, self._most = pipeline, rule, most
        self._queue: list[QueuedPipelineRow] = []
        self._changed = asyncio.Event()

    async def painted(self, rows: Sequence[PipelineRow], alike: PipelineCallSettings) -> list[PaintedRow]:
        """The rows' pictures; a caller that is cancelled takes the ones that still wait along.

        Raises:
            QueueFull: too many wait.
        """
        if len(self._queue) + len(rows) > self._most:
            raise QueueFull(retry_after_s=1.0)
        queued = [QueuedPipelineRow(alike, time.monotonic(), row) for row in rows]
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
            if batch := next_batch(self._queue, self._rule, now):
                self._queue = [one for one in self._queue if one not in batch]
                await self._compute(batch)
                continue
            left = self._queue[0].since + self._rule.window_s - now if self._queue else None
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()

    async def _compute(self, batch: Sequence[QueuedPipelineRow]) -> None:
        began = time.monotonic()
        rows = [one.row for one in batch]
        try:
            pictures = await asyncio.to_thread(self._pipeline.paint, rows, batch[0].alike)
        except Exception as error:  # noqa: BLE001 - these requests are told any error of the pipeline; the next ones go on
            failed = InternalError(f"The pipeline failed: {type(error).__name__}: {error}")
            for one in batch:
                if not one.painted.done():
                    one.painted.set_exception(failed)
            return
        took = (time.monotonic() - began) * 1000
        for place, (one, picture) in enumerate(zip(batch, pictures, strict=True)):
            if not one.painted.done():
                waited = (began - one.since) * 1000
                one.painted.set_result(PaintedRow(picture, len(batch), place, waited, took))


@asynccontextmanager
async def serving(baseline: Baseline, host: str, port: int) -> AsyncIterator[str]:
    """Have the server listen while inside; yields its address. `port` 0 takes any free one."""
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/images/edits", partial(_answered, baseline))
    app.router.add_get("/v1/models", partial(_models, baseline))
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


async def _models(baseline: Baseline, _: web.Request) -> web.Response:
    model = {"id": baseline.name, "object": "model", "created": 0}
    return web.json_response({"object": "list", "data": [model]})


async def _answered(baseline: Baseline, request: web.Request) -> web.Response:
    try:
        return await _edit(baseline, request)
    except GiornataError as error:
        body = ErrorAnswer(error=error_detail(error.body()))
        return web.json_response(text=body.model_dump_json(), status=error.status)


async def _edit(baseline: Baseline, request: web.Request) -> web.Response:
    form, files = await _read(request)
    if form.model not in {None, baseline.name}:
        raise ModelNotFound(field="model", received=form.model, accepted=baseline.name)
    image = await asyncio.to_thread(read_image, files["image"])
    mask = await asyncio.to_thread(read_mask, files.get("mask"), files["image"])
    width, height = size_of(form, image)
    alike = PipelineCallSettings(width, height, form.num_inference_steps, form.guidance_scale, form.strength)
    seed = secrets.randbits(31) if form.seed is None else form.seed
    rows = [PipelineRow(form.prompt, image, mask, (seed + index) % (MAX_SEED + 1)) for index in range(form.n)]
    painted = await baseline.painted(rows, alike)
    pictures = await asyncio.to_thread(
        lambda: [base64.b64encode(png(one.picture)).decode() for one in painted]
    )
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


async def _read(request: web.Request) -> tuple[BaselineForm, dict[str, bytes]]:
    """A request's form and its files."""
    try:
        posted = await request.post()
    except ValueError as error:
        raise InvalidField("The body is no form.", received=request.content_type) from error
    files: dict[str, bytes] = {}
    fields: dict[str, str] = {}
    for name, part in posted.items():
        if isinstance(part, str):
            fields[name] = part
        elif isinstance(part, web.FileField):
            with part.file as file:
                files[name.removesuffix("[]")] = file.read()
    if unknown := files.keys() - {"image", "mask"}:
        raise InvalidField(field=min(unknown), received="a file", accepted="image and mask")
    if "image" not in files:
        raise InvalidField("An edit needs a picture.", field="image", received="no image", accepted="a file")
    try:
        return BaselineForm.model_validate(fields), files
    except ValidationError as error:
        raise request_error(error, BaselineForm.model_fields) from error


@dataclass(frozen=True)
class BaselineOptions:
    """Flags of ``giornata bench baseline``."""

    model: str
    host: str
    port: int
    batch: int
    window_ms: float
    queue: int
    device: str
    dtype: str
    torch_threads: int


async def serve(options: BaselineOptions) -> int:
    """Load the checkpoint, print the address, serve until cancelled."""
    gpu = options.device != "cpu" and torch.cuda.is_available()
    device = torch.device(("cuda" if gpu else "cpu") if options.device == "auto" else options.device)
    usual = "bfloat16" if device.type == "cuda" else "float32"
    torch.set_num_threads(options.torch_threads)
    pipeline = await asyncio.to_thread(
        Pipeline, options.model, device, getattr(torch, usual if options.dtype == "auto" else options.dtype)
    )
    baseline = Baseline(pipeline, BatchPolicy(options.batch, options.window_ms / 1000), options.queue)
    async with serving(baseline, options.host, options.port) as url:
        print(f"{pipeline.name} at {url}: up to {options.batch} pictures a batch", flush=True)
        await asyncio.Event().wait()
    return 0
