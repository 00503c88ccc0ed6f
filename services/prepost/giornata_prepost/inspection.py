"""The image work of a job before it is encoded: files from the blob store, through the pool, results back to it."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from functools import partial

import torch

from giornata import tensors
from giornata.blobs import BlobStore
from giornata.tracing import span
from giornata.wire.errors import InputLost
from giornata.wire.jobs import BlobRef, Inspection, Job
from giornata.wire.messages import FinishRequest
from giornata.wire.models import ModelCard, Task
from giornata_prepost.images import stages
from giornata_prepost.images.conditions import ModelCrop, control_images, prepare
from giornata_prepost.images.geometry import Size
from giornata_prepost.images.stages import ControlFiles, InspectedEdit, PixelLimits, inspect, inspect_regions
from giornata_prepost.worker_pools import ImagePool


def new_key(folder: str, name: str) -> str:
    """A key that no other call has.

    A stage that is tried again may differ in the last digit, and an earlier claim check keeps its bytes.
    """
    return f"{folder}{name}-{secrets.token_hex(4)}"


def model_size(inspection: Inspection) -> Size:
    """Pixels of the picture that the model sees."""
    return Size(inspection.model_width, inspection.model_height)


async def store_intermediate(blobs: BlobStore, job: Job, name: str, data: bytes) -> BlobRef:
    """Store what the job's next stages read, for as long as an intermediate result is kept."""
    return await blobs.put(new_key(job.folder, name), data, job.intermediate_ttl_s)


def inspection_of(found: InspectedEdit, compute_ms: float, **stored: BlobRef | None) -> Inspection:
    """The measures for the router, with claim checks instead of blobs: `stored`, by the names of these."""
    blobs = dict.fromkeys(("prepared", "alpha", "references", "controls")) | stored
    return Inspection.model_validate(vars(found) | blobs | {"compute_ms": compute_ms})


def latents_of(data: bytes, request: FinishRequest) -> torch.Tensor:
    """`latents` (tokens, 4 * latent_channels) of a row's blob."""
    latents = tensors.unpack(data).get("latents")
    if latents is None or latents.ndim != 2 or latents.shape[0] != request.inspection.tokens:
        received = "no latents" if latents is None else f"latents of shape {tuple(latents.shape)}"
        raise InputLost("A blob does not hold this row's latents.", received=received)
    return latents


@dataclass(frozen=True)
class ImageInspector:
    """One instance's, for the model of `card`."""

    blobs: BlobStore
    pool: ImagePool
    card: ModelCard
    limits: PixelLimits
    timeout_s: float
    """Time that the pictures of one job may take in a process."""
    held: asyncio.Semaphore
    """Bounds the jobs whose pictures are in memory."""

    async def inspection(self, job: Job) -> Inspection:
        """Decode and measure the job's pictures; prepare them for the autoencoder."""
        if job.task is Task.GENERATE:
            return await self._generation(job)
        async with self.held:
            found, compute_ms = await self.measured(job)
        stored = {
            name: None if data is None else await store_intermediate(self.blobs, job, name, data)
            for name, data in (
                ("prepared", found.prepared),
                ("alpha", found.alpha),
                ("references", found.references),
                ("controls", found.controls),
            )
        }
        return inspection_of(found, compute_ms, **stored)

    async def measured(self, job: Job) -> tuple[InspectedEdit, float]:
        """Return what inspecting an edit finds, and the milliseconds that it took in a process of the pool."""
        if job.image is None:
            raise InputLost("A job without image has nothing to inspect.", received=job.job_id)
        image = await self.blobs.get(job.image)
        references = await self._files(job.references)
        if job.regions:
            regions = await self._files(job.regions)
            each = (image, regions, job.parameters, self.card, self.limits, references)
            work = self.pool.timed(inspect_regions, *each, limit_s=self.timeout_s)
        else:
            mask = await self.blobs.get(job.mask) if job.mask else None
            controls = ControlFiles(await self._files(job.control_images), job.controls)
            edit = (image, mask, job.parameters, self.card, self.limits, references, controls)
            work = self.pool.timed(inspect, *edit, limit_s=self.timeout_s)
        with span("inspect pictures") as inspecting:
            found, compute_ms = await work
            inspecting.note(compute_ms=compute_ms)
        return found, compute_ms

    async def _generation(self, job: Job) -> Inspection:
        """The inspection of a generation, which has no picture but its references and control images."""
        measured = partial(stages.measure_generation, job.parameters, self.card, self.limits)
        found = measured()
        in_pool = partial(self.pool.timed, limit_s=self.timeout_s)
        most = self.limits.max_pixels
        async with self.held:
            if job.references:
                files = await self._files(job.references)
                pixels = most, self.limits.budget_pixels
                beside, compute_ms = await in_pool(prepare, files, self.card, *pixels)
                found = await self._with(measured(beside.grids), job, "references", beside.packed, compute_ms)
            if job.controls:
                files, size = await self._files(job.control_images), model_size(found)
                view = ModelCrop(size, None, size)
                packed, compute_ms = await in_pool(control_images, files, job.controls, view, most)
                found = await self._with(found, job, "controls", packed, compute_ms)
        return found

    async def _with(
        self, found: Inspection, job: Job, name: str, data: bytes | None, compute_ms: float
    ) -> Inspection:
        """The inspection with one result more."""
        stored = None if data is None else await store_intermediate(self.blobs, job, name, data)
        return found.model_copy(update={name: stored, "compute_ms": found.compute_ms + compute_ms})

    async def _files(self, refs: tuple[BlobRef, ...]) -> list[bytes]:
        return [await self.blobs.get(ref) for ref in refs]
