"""Previews: as which bytes they travel. Pure.

A preview is the clean latent that a step predicts, seen through the family's preview map, one pixel per
latent pixel. It is a JPEG: at this size it is about as small as WebP and ten times as fast (0.13 ms against 1.5 ms
for 128x128 pixels).
"""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from typing import Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from giornata.wire.events import PREVIEW_BYTES, PREVIEW_JOB_BYTES, PreviewEvent
from giornata.wire.jobs import Job
from giornata.wire.messages import RunRequest
from giornata.wire.requests import OutputFormat
from giornata_denoiser.engine.protocol import RowPreview

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
