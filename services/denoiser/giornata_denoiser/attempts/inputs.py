"""From a run request to the engine's rows: their tensors, their adapters, and what they take from a template."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Final

import structlog
from torch import Tensor

from giornata import tensors
from giornata.blobs import BlobStore, intermediate
from giornata.control.networks import read_control_images, select_control_images
from giornata.packed.packing import Region, region_of, unite_regions, with_companions
from giornata.planning.cost_model import refresh_interval, refresh_offset
from giornata.planning.operations import StepCosts, low_rank_weights, work_of
from giornata.scheduling.batch import RowKey
from giornata.wire.adapters import ControlUse, ControlWork, LoraUse
from giornata.wire.errors import InputLost, InvalidField, SchemaMismatch, TaskNotSupported
from giornata.wire.jobs import BlobRef, Job, RowRecord, RowState
from giornata.wire.messages import PrefetchTemplate, RunRequest
from giornata.wire.models import Task
from giornata.wire.requests import EditParameters, Reuse
from giornata.wire.resolution import check_taken, guided_by, steps_of
from giornata.wire.templates import TemplateInputs
from giornata.wire.values import Intermediate
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.config import DenoiserConfig, TextReusePolicy
from giornata_denoiser.engine.step_budget import recorded_bytes, renew_steps, reuse_profits, run_ms
from giornata_denoiser.families.network import NOISE, ModelFamily, build_row, read_references
from giornata_denoiser.rows.parts import NO_ADAPTERS, Adapters, RowControl, RowLora, rule_of
from giornata_denoiser.rows.row import RecordingSpec, Row, RowReuse, SamplerTable, Snapshot
from giornata_denoiser.rows.template import CachedTemplate
from giornata_denoiser.templates.runs import (
    ANYWHERE,
    PendingRegistration,
    TemplateRegistrations,
    TemplateRuns,
    TemplateRunSpec,
    in_thread,
    takes_from_recordings,
    wanted_recording,
)
from giornata_denoiser.templates.store import CorrectionCache, TemplateStore

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


@dataclass(frozen=True)
class TemplateReuse:
    """The way in which a job's rows reuse a template."""

    tolerance: float
    """How far the noise level of an entry may be from a row's."""
    recording: CachedTemplate | None
    """The recording that is taken from; None where there is none. The noise is the same."""
    costs: StepCosts
    """Where taking gains nothing, everything is computed."""
    renew_steps: int = 0
    """Without a recording: at most so many steps from one that is computed in full to the next; 0 computes all so."""
    known: CorrectionCache | None = None
    """What earlier edits have learned; None where every row is to learn its own."""
    leaves: RecordingSpec | None = None
    """Without a recording: what the first row leaves for later edits; None for nothing."""
    room_bytes: int = 0
    """The most that it may leave."""
    keeps_padding: bool = False
    """Whether rows compute the padding of their prompts in some steps, and take what these made in the others."""


class TemplateLookup:
    """Finds recordings for edits; tells `runs` of misses and `registrations` of registered templates that it finds."""

    def __init__(
        self,
        config: DenoiserConfig,
        checkpoint: Checkpoint,
        store: TemplateStore,
        *,
        runs: TemplateRuns,
        registrations: TemplateRegistrations,
        costs: Callable[[], StepCosts],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._config, self._checkpoint, self._store, self._runs = config, checkpoint, store, runs
        self._registrations, self._costs, self._tasks = registrations, costs, tasks
        self._renew_steps = renew_steps(config.renew_steps, checkpoint.family)

    @asynccontextmanager
    async def held(self, request: RunRequest) -> AsyncIterator[TemplateReuse | None]:
        """Return how the rows of `request` reuse; begins to record where nothing is recorded and should be.

        The recording stays in memory within the context, from when it is there.

        Raises:
            InvalidField: the edit has no step to compute.
        """
        job, empty_text = request.job, request.encoding.empty_text
        if empty_text is None or not takes_from_recordings(job.parameters, self._checkpoint.family):
            yield None
            return
        asked = await asyncio.to_thread(self._wanted, request)
        with self._store.pinned(asked.recording_id):
            recording, leaves = (
                await self._recording(request, asked, empty_text) if asked.fits else (None, False)
            )
            # `strict` asks for the picture of full computation, as nearly as can be.
            how = TemplateReuse(asked.tolerance, recording, self._costs())
            if asked.tolerance == ANYWHERE:
                how = replace(
                    how,
                    renew_steps=self._renew_steps,
                    known=self._store.corrections,
                    leaves=asked.first if leaves else None,
                    room_bytes=self._store.first.budget_bytes,
                    keeps_padding=self._config.reuse_text is TextReusePolicy.PADDING,
                )
            yield how

    def learn(self, rows: Iterable[Row]) -> None:
        """Keep what `rows` have learned, or left, for later edits.

        Rows that want every step as it would be alone teach nothing.
        """
        for row in rows:
            if row.done and row.records is not None and not row.background:
                self._tasks.create_task(in_thread(self._store.first.keep, row), name="first")
            if not row.reuse.taught or row.reuse.tolerance != ANYWHERE or row.reuse.template is None:
                continue
            if self._store.has(row.reuse.template) and self._store.corrections.claim(row):
                keeping = in_thread(self._store.corrections.keep, row)
                self._tasks.create_task(keeping, name="correction")

    def prefetch(self, request: PrefetchTemplate) -> None:
        """Read what is on disk for an edit that reuses into memory: the edit is about to come."""
        if request.job.parameters.reuse is Reuse.OFF:
            return

        def work() -> None:
            self._store.prefetch(self._wanted(request).recording_id)

        self._tasks.create_task(in_thread(work), name="prefetch")

    def _wanted(self, request: RunRequest | PrefetchTemplate) -> TemplateRunSpec:
        """Call it in a worker thread: noise levels take a scheduler's making."""
        job = request.job
        return wanted_recording(
            self._config, self._checkpoint, job.tenant, request.inspection, job.parameters
        )

    async def _recording(
        self, request: RunRequest, asked: TemplateRunSpec, empty_text: BlobRef
    ) -> tuple[CachedTemplate | None, bool]:
        """The recording that an edit takes from, and whether one without it is to leave what its own steps make."""
        job, registered, anywhere = request.job, None, asked.tolerance == ANYWHERE
        if job.template_id is not None and anywhere:
            registered = PendingRegistration(job.tenant, job.template_id, request.inspection.template_key)
        try:
            first = asked.first.name if anywhere else None
            found = await asyncio.to_thread(self._store.find, asked.recording_id, first)
        except Exception:  # the edge of edits: logged; they go on without the recording
            log.exception("template_not_read", template=asked.recording_id)
            found = None
        if found is None or found.edited is not None:
            inputs = TemplateInputs(
                inspection=request.inspection,
                empty_text=empty_text,
                conditioning=request.encoding.rows[0],
                references=request.encoding.references,
            )
            made = await self._runs.missed(
                asked, inputs, registered, known=job.template_id is not None, served=found is not None
            )
            in_part = anywhere and self._renew_steps > 0  # what computes every step in full leaves nothing
            leaves = in_part and found is None and made is None and self._runs.leaves(asked)
            if leaves:
                self._store.first.expect(asked.first.name)
            return made or found, leaves
        if registered is not None:  # the worker that was to record it may have died
            told = self._registrations.report(registered, found.size_bytes, only_waiting=True)
            self._tasks.create_task(told, name="registered")
        return found, False


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
    leaves = every and not row.step and row.adapters == NO_ADAPTERS and row.step_cache is None
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
