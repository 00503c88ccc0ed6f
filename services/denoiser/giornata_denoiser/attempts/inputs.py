"""From a run request to the engine's rows: fetch the claim checks, build the rows off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import structlog
from torch import Tensor

from giornata import tensors
from giornata.blobs import BlobStore, intermediate
from giornata.control.inputs import images, images_of
from giornata.packed.region import Region, beside, region_of, united
from giornata.planning.controls import work_of
from giornata.planning.costs import renewed_every, renewed_later
from giornata.scheduling.batch import RowKey
from giornata.wire.defaults import steps_of
from giornata.wire.errors import InputLost, InvalidField, SchemaMismatch, TaskNotSupported
from giornata.wire.messages import RunRequest
from giornata.wire.models import Task
from giornata.wire.progress import RowRecord
from giornata.wire.requests import EditParameters
from giornata.wire.resolution import guided_by
from giornata.wire.step_caches import StepCache
from giornata.wire.values import Intermediate
from giornata_denoiser.attempts.adapting import adapters_of
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.engine.weighing import profits, recorded_bytes, run_ms
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.families.rows import NOISE, build_row, referred
from giornata_denoiser.rows.adapters import NONE
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.snapshot import Snapshot
from giornata_denoiser.rows.step_cache import rule_of
from giornata_denoiser.rows.template import CachedTemplate
from giornata_denoiser.rows.track import SamplerTable
from giornata_denoiser.templates.lookup import TemplateReuse

log = structlog.get_logger(__name__)


async def rows_of(
    request: RunRequest, checkpoint: Checkpoint, blobs: BlobStore, reusing: TemplateReuse | None
) -> tuple[Row, ...]:
    """The rows of `request`; without `reusing` they compute whole pictures from their own noise.

    Raises:
        IntermediateLost: the encoding is no longer in the blob store; a lost latent only means to begin again.
        SchemaMismatch: the inputs do not fit the checkpoint.
        ServiceUnavailable: the blob store does not answer.
    """
    text, shared = await intermediate(blobs, request.encoding.text, Intermediate.ENCODING), b""
    if request.encoding.references is not None:
        shared = await intermediate(blobs, request.encoding.references, Intermediate.ENCODING)
    references = referred(shared, request.inspection)
    rows: list[Row] = []
    for row in request.rows:
        if row.index >= len(request.encoding.rows):
            raise SchemaMismatch("A row has no encoding.", received=row.index)
        conditioning = await intermediate(blobs, request.encoding.rows[row.index], Intermediate.ENCODING)
        latents = await _latents(row, blobs)
        controls = await _controls(request, row.index, checkpoint, blobs)
        how = reusing if reusing is None or not rows else replace(reusing, leaves=None)
        work = partial(
            _made,
            request,
            checkpoint,
            row,
            how,
            text=text,
            conditioning=conditioning,
            references=references,
            latents=latents,
            controls=controls,
        )
        rows.append(await asyncio.to_thread(work))
    return tuple(rows)


async def _controls(
    request: RunRequest, index: int, checkpoint: Checkpoint, blobs: BlobStore
) -> bytes | None:
    """What the ControlNets of a row see; None without any, and where this process cannot compute them all."""
    uses = request.job.controls
    if not uses or any(use.digest not in checkpoint.controlnets for use in uses):
        return None
    return await intermediate(blobs, images_of(request.encoding, index), Intermediate.ENCODING)


async def _latents(row: RowRecord, blobs: BlobStore) -> bytes | None:
    """Where the row goes on; None to begin."""
    if row.resume is None:
        return None
    try:
        return await blobs.get(row.resume.latents)
    except InputLost as error:
        log.warning("resume_lost", index=row.index, step=row.resume.step, error=str(error))
        return None


def track_of(parameters: EditParameters, checkpoint: Checkpoint, task: Task, cells: int) -> SamplerTable:
    """The track of a row; InvalidField names what the request said of its steps: their number, or the quality."""
    schedule, steps = checkpoint.family.schedule, parameters.num_inference_steps
    if steps is None or parameters.strength is None:
        raise SchemaMismatch("Denoising needs resolved parameters.")
    sampler, quality = parameters.sampler or schedule.default_sampler, parameters.quality
    try:
        return schedule.track(sampler=sampler, steps=steps, strength=parameters.strength, cells=cells)
    except InvalidField as error:
        meant = quality != "auto" and steps == steps_of(quality, checkpoint.card, task)
        if meant and error.field == "num_inference_steps":
            error.field, error.received = "quality", f"{quality}, which is {steps} steps"
            error.accepted = f"{error.accepted} steps, by another quality or num_inference_steps"
        raise


def _made(
    request: RunRequest,
    checkpoint: Checkpoint,
    row: RowRecord,
    reusing: TemplateReuse | None,
    *,
    text: bytes,
    conditioning: bytes,
    references: Sequence[Tensor],
    latents: bytes | None,
    controls: bytes | None,
) -> Row:
    """One row from safetensors. Unpacking and regions take milliseconds: call it in a worker thread."""
    parameters, inspection = request.job.parameters, request.inspection
    generated = request.job.task is Task.GENERATE
    if generated and Task.GENERATE not in checkpoint.card.tasks:
        raise TaskNotSupported(received=Task.GENERATE, accepted=", ".join(checkpoint.card.tasks))
    if parameters.step_cache not in {StepCache.OFF, *checkpoint.card.step_caches}:
        raise InvalidField(
            "This worker has no such step cache.",
            field="step_cache",
            received=parameters.step_cache,
            accepted=", ".join((StepCache.OFF, *checkpoint.card.step_caches)),
        )
    multiple, family = checkpoint.card.pixel_multiple, checkpoint.family
    fields, painted = tensors.unpack(conditioning), painted_region(request)
    where = None if reusing is None else painted
    track = track_of(parameters, checkpoint, request.job.task, inspection.tokens)
    built = build_row(
        family,
        RowKey(request.job.job_id, request.attempt, row.index),
        grid=(inspection.model_height // multiple, inspection.model_width // multiple),
        track=track,
        text=tensors.unpack(text),
        conditioning=fields,
        guidance_scale=parameters.guidance_scale or 0.0,
        true_cfg_scale=guided_by(request.job),
        partial_images=parameters.partial_images,
        resume=_snapshot(row, latents),
        generated=generated,
        references=references,
        adapters=adapters_of(
            request.job,
            track.steps,
            None if latents is None else row.resume,
            {digest: work_of(net.card) for digest, net in checkpoint.controlnets.items()},
        ),
    )
    built = replace(built, step_cache=rule_of(parameters))
    if controls is not None:
        seen = images(tensors.unpack(controls), len(request.job.controls))
        built = replace(built, control_images=tuple(each.to(family.dtype) for each in seen))
    return built if reusing is None else reused(built, where, reusing, family)


def reused(row: Row, where: Region | None, how: TemplateReuse, family: ModelFamily) -> Row:
    """`row` without computing outside of `where`, if that gains anything; otherwise that of full computation.

    Where there is no recording, or it is not worth its loads, the row takes what its own steps make.
    """
    row = replace(row, skipped=how.recording is not None, keeps_padding=how.keeps_padding)
    if where is None:
        return row
    where = beside(where, row.companions)
    renewing = _renewing(row, where, how, family)
    taking = row if how.recording is None else _taking(row, where, how.recording, how, family)
    if how.recording is not None and how.recording.edited is not None:
        times = [run_ms(each, how.costs, family.operations) for each in (taking, renewing)]
        if times[0] >= times[1]:
            taking = row
    return next((each for each in (taking, renewing) if profits(each, how.costs, family)), row)


def _renewing(row: Row, where: Region, how: TemplateReuse, family: ModelFamily) -> Row:
    """`row` as it takes what its own steps make, and leaves it where it is asked to and there is room."""
    every = renewed_every(row.steps, how.renew_steps)
    later = renewed_later(row.key.index, row.steps, every)
    renewing = replace(row, region=where, renewed_every=every, renewed_later=later)
    # A template is recorded without adapters, on the way of a row that computes all of its steps.
    leaves = every and not row.step and row.adapters == NONE and row.step_cache is None
    leaving = replace(renewing, records=how.leaves if leaves else None)
    return leaving if recorded_bytes(leaving, family) <= how.room_bytes else renewing


def _taking(
    row: Row, where: Region, recording: CachedTemplate, how: TemplateReuse, family: ModelFamily
) -> Row:
    """`row` as it takes from the `recording` of `how`, whose noise it has outside; `row` itself where it cannot.

    Of what an edit has left it takes nothing that this edit repainted, but computes it, too. Where no edit has learned
    the correction of its mask, it takes that of another mask and computes what lies in either of both, if that is less
    than computing its first step in full.
    """
    known, sequences = how.known, len(row.prompts)
    if recording.edited is not None:
        either = united(where, recording.edited)
        if either is None:
            return row
        where = either
    noise = recording.noise_beside(row.conditioning[NOISE], where)
    taking = replace(
        row,
        conditioning={**row.conditioning, NOISE: noise},
        latent=row.latent if row.step else row.track.begun(row.conditioning.get("image_latents"), noise),
        region=where,
        template=recording,
        tolerance=how.tolerance,
        skipped=False,
    )
    under = row.adapters.learned_under(row.step)
    if known is None or under is None:
        return taking
    if (found := known.find(recording.id, where, sequences, under)) is not None:
        return replace(taking, corrections=found)
    if (wider := known.nearest(recording.id, where, sequences, under)) is None:
        return taking
    widened = replace(taking, region=wider, corrections=())
    if run_ms(widened, how.costs, family.operations) >= run_ms(taking, how.costs, family.operations):
        return taking
    found = known.widened(recording.id, wider, sequences, under)
    return taking if found is None else replace(widened, corrections=found)


def painted_region(request: RunRequest) -> Region | None:
    """The tokens, one by one, that an edit computes where it reuses the others; None where it computes all."""
    cells = request.inspection.computed_by(request.job.parameters)
    return None if cells is None else region_of(cells)


def _snapshot(row: RowRecord, latents: bytes | None) -> Snapshot | None:
    if row.resume is None or latents is None:
        return None
    return Snapshot.of(row.resume.step, tensors.unpack(latents))
