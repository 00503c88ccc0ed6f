"""One edit of a family, prepared by prepost and taken by the denoiser as `reuse` says."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from giornata import tensors
from giornata.families import Family
from giornata.planning.operations import StepCosts
from giornata.wire.jobs import BlobRef, Encoding, Inspection, Job, Priority, RowRecord
from giornata.wire.messages import RunRequest
from giornata.wire.requests import EditParameters, Reuse
from giornata.wire.resolution import cfg_scale, resolve
from giornata_denoiser.attempts.inputs import TemplateReuse, rows_of
from giornata_denoiser.rows.row import Row
from giornata_prepost.encoding import EncodingInputs, JobConditioning, encode_job
from giornata_prepost.images.pictures import Size
from giornata_prepost.images.stages import InspectedEdit, PixelLimits, inspect
from tests.fakes.blobs import MemoryBlobs
from tests.fakes.fleet import REF
from tests.integration.painting import Served
from tests.integration.prepost.asking import png

SIZE: Final = Size(128, 128)
LIMITS: Final = PixelLimits(1 << 20, 1 << 20)
SEED, PICTURES = 7, 2
COMPUTING_COSTS: Final = StepCosts((0.1, 0.0, 1.0, 0.0, 0.0, 0.0))
"""Computing costs, loading nothing: what can be taken is."""
FREE: Final = {
    Family.FLUX2, Family.FLUX2_KLEIN, Family.FLUX2_KLEIN_KV, Family.FLUX_KONTEXT, Family.QWEN_IMAGE_EDIT_PLUS,
    Family.QWEN_IMAGE_21,
}  # fmt: skip
"""Families whose pipelines draw nothing of the picture's posterior."""
NINE: Final = {Family.SD_INPAINT, Family.SDXL_INPAINT}
"""Families whose pipelines do not encode the picture at full strength."""


def _scene() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(1).integers(0, 256, (SIZE.height, SIZE.width, 3), np.uint8)


def _marked() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """On no grid, and small enough that a cell of the largest ones is left."""
    mask = np.zeros((SIZE.height, SIZE.width), np.uint8)
    mask[3:39, 9:50] = 255
    return mask


@dataclass
class ReusingEdit:
    """The edit; `fields` are those of its request."""

    of: Served
    fields: dict[str, Any] = field(default_factory=dict)

    def job(self, reuse: Reuse) -> Job:
        card, usual = self.of.card, {"n": PICTURES, "num_inference_steps": 3, "halo": 0, "mask_blur": 0}
        parameters = resolve(
            EditParameters(prompt="a red hat", reuse=reuse, **usual | self.fields), card, SEED
        )
        return Job(
            job_id="edit",
            tenant="t",
            gateway="g",
            priority=Priority.BATCH,
            model=card.name,
            model_digest=card.digest,
            parameters=parameters,
            image=REF,
            cfg_scale=cfg_scale(parameters, card),
            budget_ms=1000,
            result_ttl_s=60,
        )

    def inspected(self, job: Job) -> InspectedEdit:
        return inspect(png(_scene()), png(_marked()), job.parameters, self.of.card, LIMITS)

    def encoded(self, reuse: Reuse) -> tuple[Job, Inspection, JobConditioning]:
        """The job, and what prepost makes of it."""
        job = self.job(reuse)
        found = self.inspected(job)
        return job, found.measures, encode_job(self.of.images, job, EncodingInputs(found.prepared), SIZE)

    async def rows(self, reuse: Reuse, how: TemplateReuse | None) -> tuple[Inspection, tuple[Row, ...]]:
        """The rows that a denoiser makes of it."""
        blobs = MemoryBlobs()

        async def kept(data: bytes) -> BlobRef:
            return await blobs.put(secrets.token_hex(8), data, 60)

        job, inspection, made = self.encoded(reuse)
        encoding = Encoding(
            text=await kept(tensors.pack(made.text)),
            text_tokens=self.of.images.text_tokens(made.text),
            rows=tuple([await kept(row) for row in made.rows]),
        )
        records = tuple(RowRecord(index=index, seed=SEED + index) for index in range(PICTURES))
        request = RunRequest(
            job=job, attempt=1, inspection=inspection, encoding=encoding, rows=records, remaining_ms=1000
        )
        return inspection, tuple(await rows_of(request, self.of.checkpoint, blobs, how))
