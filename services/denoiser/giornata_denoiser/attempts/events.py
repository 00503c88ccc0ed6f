"""Events and spans of an attempt: its steps, and previews of its pictures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Final

import nats.errors
import numpy as np
import numpy.typing as npt
import structlog
from PIL import Image
from pydantic import BaseModel

from giornata.bus.bus import Bus
from giornata.tracing import NO_STEPS, StepSpans, span
from giornata.wire import subjects
from giornata.wire.jobs import Job
from giornata.wire.messages import PREVIEW_BYTES, PREVIEW_JOB_BYTES, EventKind, PreviewEvent, RunRequest
from giornata.wire.requests import OutputFormat
from giornata_denoiser.attempts.attempt import Attempt
from giornata_denoiser.attempts.results import template_use
from giornata_denoiser.engine.protocol import RowPreview, StepReport

# Previews: as which bytes they travel. Pure.
#
# A preview is the clean latent that a step predicts, seen through the family's preview map, one pixel per
# latent pixel. It is a JPEG: at this size it is about as small as WebP and ten times as fast (0.13 ms
# against 1.5 ms for 128x128 pixels).


FORMAT: Final = OutputFormat.JPEG
QUALITIES: Final = (85, 70, 50, 30, 15)
"""Tried in this order until a preview fits; then again with half as many pixels a side."""


def limit_bytes(job: Job) -> int:
    """Bytes that one preview of a job may have: all of them together keep to the job's share of the event stream."""
    asked = job.parameters.n * job.parameters.partial_images
    return min(PREVIEW_BYTES, PREVIEW_JOB_BYTES // max(1, asked))


def encode(pixels: npt.NDArray[np.uint8], limit: int) -> tuple[bytes, tuple[int, int]]:
    """`pixels`, (height, width, 3) RGB, as JPEG of at most `limit` bytes, and its width and height.

    Quality is given up first, then size.

    A pixel alone takes 700 bytes.

    Raises:
        ValueError: not even one pixel fits.
    """
    for picture, quality in _attempts(Image.fromarray(pixels)):
        target = BytesIO()
        picture.save(target, FORMAT.value, quality=quality, subsampling=0)
        if target.tell() <= limit:
            return target.getvalue(), picture.size
    raise ValueError(f"no preview fits into {limit} bytes")


def preview_event(request: RunRequest, preview: RowPreview) -> PreviewEvent:
    """The event that shows `preview`, a row of `request`. Encodes: call it away from the event loop."""
    image, size = encode(preview.pixels, limit_bytes(request.job))
    return PreviewEvent(
        job_id=preview.key.job_id,
        attempt=preview.key.attempt,
        index=preview.key.index,
        step=preview.step,
        steps=preview.steps,
        partial_image_index=preview.index,
        image=image,
        size=size,
        format=FORMAT,
        box=request.inspection.painted_box,
    )


def _attempts(picture: Image.Image) -> Iterator[tuple[Image.Image, int]]:
    while True:
        for quality in QUALITIES:
            yield picture, quality
        if max(picture.size) == 1:
            return
        picture = picture.resize([max(1, side // 2) for side in picture.size], Image.Resampling.BOX)


# Telling of steps and pictures, in order, beside the engine's work.


log = structlog.get_logger(__name__)


class EventPublisher:
    """Publishes the events of a denoiser's jobs."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._previews: asyncio.Queue[tuple[RunRequest, RowPreview]] = asyncio.Queue()

    def show(self, request: RunRequest, preview: RowPreview) -> None:
        """Have :meth:`shown` tell it when those before it are told."""
        self._previews.put_nowait((request, preview))

    async def shown(self) -> None:
        """Encode and tell previews, one at a time and in order; until it is cancelled."""
        while True:
            request, preview = await self._previews.get()
            try:
                event = await asyncio.to_thread(preview_event, request, preview)
                await self.publish(request.job, EventKind.PREVIEW, event)
            except Exception:  # the preview's edge: logged; the picture itself goes on
                log.exception("preview_lost", job=request.job.job_id, step=preview.step)

    async def publish(self, job: Job, kind: EventKind, event: BaseModel) -> None:
        """Events may be lost while NATS is away; the record is the truth."""
        try:
            await self._bus.publish(subjects.event(job.gateway, job.job_id, kind), event)
        except nats.errors.Error as error:
            log.warning("event_lost", job=job.job_id, kind=kind, error=repr(error))


# What the spans of an attempt tell.


@contextmanager
def denoise_span(attempt: Attempt) -> Iterator[None]:
    """The span of an attempt from its acceptance to its report; its steps are told below."""
    request = attempt.request
    with span(
        "denoise",
        job=request.job.job_id,
        attempt=request.attempt,
        rows=len(request.rows),
        mask_ratio=request.inspection.mask_ratio,
    ) as carrying:
        attempt.traced = carrying.steps()
        try:
            yield
        finally:
            attempt.traced.close()
            attempt.traced = NO_STEPS
            carrying.note(wait_ms=attempt.wait_ms, compute_ms=attempt.compute_ms)
            if attempt.rows:
                carrying.note(template=template_use(request.job, next(iter(attempt.rows.values()))).value)
            if attempt.errors:
                carrying.fail(next(iter(attempt.errors.values())).code)


def tell_step(steps: StepSpans, report: StepReport) -> None:
    """Tell a step that advanced rows of the attempt. Its sample is of the last step that is known to have ended."""
    now, sample = time.perf_counter(), report.sample
    began_ago_s, ended_ago_s = now - report.began_s, now - report.ended_s
    if sample is None:
        steps.add(began_ago_s, ended_ago_s, batch_rows=len(report.advanced))
        return
    steps.add(
        began_ago_s,
        ended_ago_s,
        batch_rows=sample.rows,
        tokens=sample.image_tokens,
        load_wait_ms=sample.waited_ms,
        loaded_bytes=sample.loaded_bytes,
    )
