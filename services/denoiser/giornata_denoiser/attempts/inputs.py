"""From a run request to the engine's rows: fetch the claim checks, build the rows off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import structlog
from torch import Tensor

from giornata import tensors
from giornata.blobs import BlobStore
from giornata.packed.region import region
from giornata.planning.costs import StepCosts
from giornata.scheduling.batch import RowKey
from giornata.wire import jobs
from giornata.wire.errors import InputLost, SchemaMismatch
from giornata.wire.messages import RunRequest
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.engine.weighing import profits
from giornata_denoiser.families.protocol import Family
from giornata_denoiser.rows.noise import shared_noise
from giornata_denoiser.rows.row import Row, Snapshot, build_row, with_noise
from giornata_denoiser.rows.sigmas import sigma_grid
from giornata_denoiser.rows.template import Template

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Reusing:
    """How a job's rows reuse."""

    halo: int
    tolerance: float
    """How far the noise level of an entry may be from a row's."""
    template: Template | None
    """What is taken from; None where it has not been recorded: everything is computed, from the same noise."""
    costs: StepCosts
    """Of steps: where taking from the template gains nothing, everything is computed too."""


class Blobs(NamedTuple):
    """A row's inputs as safetensors bytes."""

    text: bytes
    conditioning: bytes
    latents: bytes | None
    """Where it goes on."""


async def rows_of(
    request: RunRequest, checkpoint: Checkpoint, blobs: BlobStore, reusing: Reusing | None = None
) -> tuple[Row, ...]:
    """The rows of `request`, on the transformer's device.

    Args:
        request: what the router asks for.
        checkpoint: that computes it.
        blobs: where its inputs are.
        reusing: how it reuses; None for not at all.

    Raises:
        InputLost: an input is no longer in the blob store; a lost latent only means to begin again.
        SchemaMismatch: the inputs do not fit the checkpoint.
        ServiceUnavailable: the blob store does not answer.
    """
    text = await blobs.get(request.encoding.text)
    rows = []
    for row in request.rows:
        if row.index >= len(request.encoding.rows):
            raise SchemaMismatch("A row has no encoding.", received=row.index)
        found = Blobs(text, await blobs.get(request.encoding.rows[row.index]), await _resumed(row, blobs))
        rows.append(await asyncio.to_thread(_made, request, checkpoint, row, found, reusing))
    return tuple(rows)


def reused(row: Row, how: Reusing, family: Family) -> Row:
    """`row` as it reuses: with its template's noise outside of its region and, with a template, no computing there."""
    where = region(family.touched(row.conditioning).view(row.grid), how.halo, family.device)
    if where is None:
        return replace(row, skipped=how.template is not None)
    noise = shared_noise(row.conditioning["noise"], where)
    row = with_noise(row, noise)
    if how.template is None:
        return row
    reusing = replace(row, region=where, template=how.template, tolerance=how.tolerance)
    return reusing if profits(reusing, how.costs, family) else replace(row, skipped=True)


async def _resumed(row: jobs.Row, blobs: BlobStore) -> bytes | None:
    if row.resume is None:
        return None
    try:
        return await blobs.get(row.resume.latents)
    except InputLost as error:
        log.warning("resume_lost", index=row.index, step=row.resume.step, error=str(error))
        return None


def _made(
    request: RunRequest, checkpoint: Checkpoint, row: jobs.Row, found: Blobs, reusing: Reusing | None
) -> Row:
    """In a worker thread: unpacking, moving to the device and regions take milliseconds."""
    built = _build(request, checkpoint, row, found)
    return built if reusing is None else reused(built, reusing, checkpoint.family)


def _build(request: RunRequest, checkpoint: Checkpoint, row: jobs.Row, found: Blobs) -> Row:
    parameters, inspection = request.job.parameters, request.inspection
    if parameters.num_inference_steps is None or parameters.strength is None:
        raise SchemaMismatch("Denoising needs resolved parameters.")
    multiple = checkpoint.card.pixel_multiple
    return build_row(
        checkpoint.family,
        RowKey(request.job.job_id, request.attempt, row.index),
        grid=(inspection.model_height // multiple, inspection.model_width // multiple),
        sigmas=sigma_grid(
            checkpoint.scheduler,
            steps=parameters.num_inference_steps,
            strength=parameters.strength,
            image_tokens=inspection.tokens,
        ),
        text=tensors.unpack(found.text),
        conditioning=tensors.unpack(found.conditioning),
        guidance_scale=parameters.guidance_scale or 0.0,
        true_cfg_scale=parameters.true_cfg_scale or 1.0,
        partial_images=parameters.partial_images,
        resume=_snapshot(row, found.latents),
    )


def _snapshot(row: jobs.Row, latents: bytes | None) -> Snapshot | None:
    if row.resume is None or latents is None:
        return None
    unpacked: Mapping[str, Tensor] = tensors.unpack(latents)
    if "latents" not in unpacked:
        raise SchemaMismatch("A row's state holds no latents.", received=", ".join(unpacked) or "none")
    return Snapshot(row.resume.step, unpacked["latents"])
