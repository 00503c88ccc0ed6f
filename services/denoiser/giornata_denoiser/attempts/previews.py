"""Previews: after which steps, and as which bytes. Pure.

A preview is the clean latent that a step predicts, seen through the family's preview map, one pixel per
latent pixel. It is a JPEG: at this size it is about as small as WebP and ten times as fast (0.13 ms against 1.5 ms
for 128x128 pixels).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from giornata.scheduling.batch import RowKey
from giornata.wire.events import PREVIEW_BYTES, PREVIEW_JOB_BYTES, PreviewEvent
from giornata.wire.jobs import Job
from giornata.wire.messages import RunRequest
from giornata.wire.requests import OutputFormat

FORMAT: Final = OutputFormat.JPEG
QUALITIES: Final = (85, 70, 50, 30, 15)
"""Tried in this order until a preview fits; then again with half as many pixels a side."""


@dataclass(frozen=True, eq=False)
class RowPreview:
    """What a row looks like after a step."""

    key: RowKey
    step: int
    """Steps computed, 1 for the first."""
    steps: int
    index: int
    """0 for the row's first preview."""
    pixels: npt.NDArray[np.uint8]
    """(height, width, 3) RGB, one pixel per latent pixel."""


def preview_steps(steps: int, count: int) -> tuple[int, ...]:
    """After how many computed steps a row is shown: `count` times, evenly spread, fewer where there are fewer steps.

    Never after the last step, since the picture itself follows, and never twice after one.

    Args:
        steps: that are computed, at least 1.
        count: previews asked for, 0 or more.
    """
    shown = min(count, steps - 1)
    parts = shown + 1
    return tuple((2 * i * steps + parts) // (2 * parts) for i in range(1, parts))


def limit_bytes(job: Job) -> int:
    """Bytes that one preview of a job may have: all of them together keep to the job's share of the event stream."""
    asked = job.parameters.n * job.parameters.partial_images
    return min(PREVIEW_BYTES, PREVIEW_JOB_BYTES // max(1, asked))


def encode(pixels: npt.NDArray[np.uint8], limit: int) -> bytes:
    """`pixels` as JPEG of at most `limit` bytes: first quality is given up for that, then size.

    Args:
        pixels: (height, width, 3) RGB.
        limit: bytes; a pixel alone takes 700.

    Raises:
        ValueError: not even one pixel fits.
    """
    for picture, quality in _attempts(Image.fromarray(pixels)):
        target = BytesIO()
        picture.save(target, FORMAT.value, quality=quality, subsampling=0)
        if target.tell() <= limit:
            return target.getvalue()
    raise ValueError(f"no preview fits into {limit} bytes")


def preview_event(request: RunRequest, preview: RowPreview) -> PreviewEvent:
    """The event that shows `preview`, a row of `request`. Encodes: call it away from the event loop."""
    return PreviewEvent(
        job_id=preview.key.job_id,
        attempt=preview.key.attempt,
        index=preview.key.index,
        step=preview.step,
        steps=preview.steps,
        partial_image_index=preview.index,
        image=encode(preview.pixels, limit_bytes(request.job)),
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
