"""From a run request to the engine's rows."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Final

import structlog
from torch import Tensor

from giornata import tensors
from giornata.blobs import BlobStore, intermediate
from giornata.control.networks import read_control_images, select_control_images
from giornata.packed.compute_set import Region, region_of, unite_regions, with_companions
from giornata.planning.cost_model import refresh_interval, refresh_offset
from giornata.planning.operations import low_rank_weights, work_of
from giornata.scheduling.batch import RowKey
from giornata.wire.adapters import ControlUse, ControlWork, LoraUse
from giornata.wire.errors import InputLost, InvalidField, SchemaMismatch, TaskNotSupported
from giornata.wire.jobs import Job, RowRecord, RowState
from giornata.wire.messages import RunRequest
from giornata.wire.models import Task
from giornata.wire.requests import EditParameters
from giornata.wire.resolution import check_taken, guided_by, steps_of
from giornata.wire.values import Intermediate
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.engine.step_budget import recorded_bytes, reuse_profits, run_ms
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.families.rows import NOISE, build_row, read_references
from giornata_denoiser.rows.adapters import NONE, Adapters, RowControl, RowLora
from giornata_denoiser.rows.row import Row, RowReuse, SamplerTable, Snapshot
from giornata_denoiser.rows.step_cache import rule_of
from giornata_denoiser.rows.template import CachedTemplate
from giornata_denoiser.templates.runs import TemplateReuse

NO_NETS: Final[Mapping[str, ControlWork]] = MappingProxyType({})
ROUNDING: Final = 1e-9
"""Makes the share k / n of n steps k again."""


def adapters_of(
    job: Job, steps: int, resumed: RowState | None = None, nets: Mapping[str, ControlWork] = NO_NETS
) -> Adapters:
    """The adapters of a row of `job`, which has so many `steps` and goes on from `resumed`.

    LoRAs of a row that begins act from the last step that all of them allow. An engine lets them join earlier, unless
    the request tells the step. A row that goes on keeps what it began with. `nets` are the ControlNets that this
    process computes, by digest.
    """
    act = [lora for lora in job.loras if lora.modules and lora.scale]
    loras = (_lora(use) for use in act)
    bound = min((lora.joins_within for lora in act), default=0.0)
    loras_from = int(bound * steps + ROUNDING) if resumed is None else resumed.loras_from
    return Adapters(
        tuple(sorted(loras)),
        loras_from,
        tuple(_control(use, steps, nets) for use in job.controls),
        joins_early=job.parameters.lora_join is None,
    )


def _lora(use: LoraUse) -> RowLora:
    weights = low_rank_weights(use.weights, use.size_bytes)
    return RowLora(use.sha256, use.scale, use.rank, use.modules, use.size_bytes, weights)


def _control(use: ControlUse, steps: int, nets: Mapping[str, ControlWork]) -> RowControl:
    """The steps in which it acts are those that lie between its start and end, as pipelines of diffusers have it."""
    acts = [step for step in range(steps) if step / steps >= use.start and (step + 1) / steps <= use.end]
    first, end = (acts[0], acts[-1] + 1) if acts else (0, 0)
    return RowControl(use.model, use.digest, use.scale, first, end, use.mode, nets.get(use.digest))


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
    references, uses = read_references(shared, request.inspection), request.job.controls
    # Without any ControlNets, and where this process cannot compute them all, a row has no images of them.
    computes = bool(uses) and all(use.digest in checkpoint.control_cards for use in uses)
    rows: list[Row] = []
    for row in request.rows:
        if row.index >= len(request.encoding.rows):
            raise SchemaMismatch("A row has no encoding.", received=row.index)
        conditioning = await intermediate(blobs, request.encoding.rows[row.index], Intermediate.ENCODING)
        latents = controls = None
        if row.resume is not None:
            try:
                latents = await blobs.get(row.resume.latents)
            except InputLost as error:  # then it begins again
                log.warning("resume_lost", index=row.index, step=row.resume.step, error=str(error))
        if computes:
            images = select_control_images(request.encoding, row.index)
            controls = await intermediate(blobs, images, Intermediate.ENCODING)
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
    check_taken({"step_cache": parameters.step_cache}, checkpoint.card)
    multiple, family = checkpoint.card.pixel_multiple, checkpoint.family
    fields, cells = tensors.unpack(conditioning), inspection.computed_by(parameters)
    where = None if reusing is None or cells is None else region_of(cells)
    track = track_of(parameters, checkpoint, request.job.task, inspection.tokens)
    state = None
    if row.resume is not None and latents is not None:
        state = Snapshot.of(row.resume.step, tensors.unpack(latents))
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
        resume=state,
        generated=generated,
        references=references,
        adapters=adapters_of(
            request.job,
            track.steps,
            None if state is None else row.resume,
            {digest: work_of(card) for digest, card in checkpoint.control_cards.items()},
        ),
    )
    built = replace(built, step_cache=rule_of(parameters))
    if controls is not None:
        seen = read_control_images(tensors.unpack(controls), len(request.job.controls))
        built = replace(built, adapters=built.adapters.seeing([each.to(family.dtype) for each in seen]))
    if reusing is None:  # what may reuse, and does not, has a sampler that would not keep the picture
        return replace(built, reuse=RowReuse(skipped=request.encoding.empty_text is not None))
    return with_reuse(built, where, reusing, family)


def with_reuse(row: Row, where: Region | None, how: TemplateReuse, family: ModelFamily) -> Row:
    """`row` without computing outside of `where`, if that gains anything; otherwise that of full computation.

    Where there is no recording, or it is not worth its loads, the row takes what its own steps make.
    """
    reuse = RowReuse(skipped=how.recording is not None, keeps_padding=how.keeps_padding)
    row = replace(row, reuse=reuse)
    if where is None:
        return row
    where = with_companions(where, row.inputs.companions)
    renewing = _renewing(row, where, how, family)
    taking = row if how.recording is None else _taking(row, where, how.recording, how, family)
    if how.recording is not None and how.recording.edited is not None:
        times = [run_ms(each, how.costs, family.operations) for each in (taking, renewing)]
        if times[0] >= times[1]:
            taking = row
    return next((each for each in (taking, renewing) if reuse_profits(each, how.costs, family)), row)


def _renewing(row: Row, where: Region, how: TemplateReuse, family: ModelFamily) -> Row:
    """`row` as it takes what its own steps make, and leaves it where it is asked to and there is room."""
    every = refresh_interval(row.steps, how.renew_steps)
    later = refresh_offset(row.key.index, row.steps, every)
    reuse = replace(row.reuse, renewed_every=every, renewed_later=later)
    renewing = replace(row, region=where, reuse=reuse)
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
    known, sequences = how.known, len(row.inputs.prompts)
    if recording.edited is not None:
        either = unite_regions(where, recording.edited)
        if either is None:
            return row
        where = either
    given = row.inputs.conditioning
    noise = recording.noise_beside(given[NOISE], where)
    taking = replace(
        row,
        inputs=replace(row.inputs, conditioning={**given, NOISE: noise}),
        latent=row.latent if row.step else row.track.begun(given.get("image_latents"), noise),
        region=where,
        reuse=replace(row.reuse, template=recording, tolerance=how.tolerance, skipped=False),
    )
    under = row.adapters.learned_under(row.step)
    if known is None or under is None:
        return taking
    if (found := known.find(recording.id, where, sequences, under)) is not None:
        return taking.corrected(found)
    if (wider := known.nearest(recording.id, where, sequences, under)) is None:
        return taking
    widened = replace(taking.corrected(()), region=wider)
    if run_ms(widened, how.costs, family.operations) >= run_ms(taking, how.costs, family.operations):
        return taking
    found = known.widened(recording.id, wider, sequences, under)
    return taking if found is None else widened.corrected(found)
