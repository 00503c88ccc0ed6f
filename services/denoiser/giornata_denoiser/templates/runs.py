"""Recordings of pictures: what they are called and keep, and the runs that make them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Final

import nats.errors
import structlog
import torch

from giornata import tensors
from giornata.blobs import BlobStore
from giornata.deadlines import retry_patiently
from giornata.planning.operations import (
    LEAST_LEVELS,
    TemplateRunScope,
    is_all_or_nothing,
    largest_scope_within,
)
from giornata.records import Change, TemplateRecords
from giornata.scheduling.batch import RowKey
from giornata.scheduling.placement import TemplateRunPolicy
from giornata.wire import templates
from giornata.wire.errors import GiornataError, InternalError, ServiceUnavailable, TemplateNotFound
from giornata.wire.jobs import Inspection, picture_id
from giornata.wire.messages import RecordRequest, RemoveTemplate
from giornata.wire.models import MOMENTS, PARTS, BlockSpec, Sampler
from giornata.wire.requests import EditParameters, Reuse
from giornata.wire.templates import TemplateInputs
from giornata.wire.values import BlockMode, digest_of
from giornata.wire.workers import TemplateCounters
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.choices import BITS, EXACT, CacheForm, WeightQuantization
from giornata_denoiser.config import DenoiserConfig, TemplatePolicy
from giornata_denoiser.engine.engine import RowEngine
from giornata_denoiser.engine.model_runner import StepReport
from giornata_denoiser.families.network import ModelFamily, build_row, read_references
from giornata_denoiser.rows.row import GENERATOR, RecordingSpec, Row, SamplerTable
from giornata_denoiser.rows.template import (
    FILE_BYTES,
    CachedTemplate,
    bits_of,
    stored_bytes,
    template_generator,
    template_noise,
)
from giornata_denoiser.templates.store import TemplateStore

RECORDER: Final = 3
"""Version of what template runs record; nothing is taken from recordings of another version."""
ANYWHERE: Final = 1.0
SAME: Final = 1e-4
"""Tolerances of noise levels."""
LEVELS: Final = 6
LEVELS_TOGETHER: Final = 12
"""Recorded noise levels where none are configured: of transformers, and of networks whose blocks are taken together.
Decision record 0013 has the measurements."""
NEAR_TOGETHER: Final = frozenset(
    {
        Sampler.DDIM,
        Sampler.EULER,
        Sampler.DPMPP_2M,
        Sampler.DPMPP_2M_KARRAS,
        Sampler.UNIPC,
        Sampler.HEUN,
    }
)
"""Samplers that keep the pictures of networks whose blocks are taken together, by the same measurements."""


@dataclass(frozen=True)
class TemplateRunSpec:
    """A recording that is taken from, or made."""

    recording_id: str
    """The id of the picture, a dash, and a digest of how it is recorded."""
    track: SamplerTable
    """Noise levels of its run."""
    tolerance: float
    form: CacheForm
    bits: int
    """See :mod:`giornata_denoiser.rows.template`."""
    first_block: int
    """Blocks before it keep nothing, for want of bytes."""
    fits: bool
    """Whether any block is kept."""
    first: RecordingSpec
    """What an edit that finds no recording leaves for later ones."""


def wanted_recording(
    config: DenoiserConfig,
    checkpoint: Checkpoint,
    tenant: str,
    inspection: Inspection,
    parameters: EditParameters | None = None,
) -> TemplateRunSpec:
    """The recording of a picture, which is its tenant's own.

    Its noise levels are the configured number of levels, or as many as fit; for an edit with `strict`, they are the
    edit's own.

    Raises:
        InvalidField: the edit has no step to compute.
    """
    schedule, form = checkpoint.family.schedule, form_of(config, checkpoint.family)
    levels = partial(schedule.track, cells=inspection.tokens)
    multiple = checkpoint.card.pixel_multiple
    grid = inspection.model_height // multiple, inspection.model_width // multiple
    tokens = inspection.tokens + checkpoint.family.network.companions(grid, inspection.reference_grids)
    strict = parameters is not None and parameters.reuse is Reuse.STRICT
    if parameters is not None and strict:
        steps = parameters.num_inference_steps or levels_of(config, checkpoint.family)
        sampler = parameters.sampler or schedule.default_sampler
        track = levels(sampler=sampler, steps=steps, strength=parameters.strength or 1.0)
        kept, bits = storage_budget(config, checkpoint.family, tokens, track.steps, track.steps)
    else:
        kept, bits = storage_budget(config, checkpoint.family, tokens, levels_of(config, checkpoint.family))
        track = levels(sampler=schedule.recorder, steps=kept.levels, strength=1.0)
    levels_kept = [round(level, 6) for level in track.levels.tolist()]
    guidance = checkpoint.card.embedded_guidance_scale
    numerics = () if config.quantize is WeightQuantization.OFF else (config.quantize,)
    what = (form, bits, levels_kept, guidance, kept.first_block, *numerics)
    picture = picture_id(tenant, inspection.template_key)
    left = digest_of(RECORDER, "first", form, bits, kept.first_block, *numerics)
    return TemplateRunSpec(
        f"{picture}-{digest_of(RECORDER, *what)}",
        track,
        SAME if strict else ANYWHERE,
        form,
        bits,
        kept.first_block,
        fits=kept.first_block < checkpoint.family.depth,
        first=RecordingSpec(frozenset({form}), bits, kept.first_block, f"{picture}-{left}"),
    )


def levels_of(config: DenoiserConfig, family: ModelFamily) -> int:
    """Noise levels of a template run, as far as they fit: the configured number, or the family's own."""
    own = LEVELS_TOGETHER if is_all_or_nothing(family.specs) else LEVELS
    return own if config.template_levels is None else config.template_levels


def takes_from_recordings(parameters: EditParameters, family: ModelFamily) -> bool:
    """Return whether an edit takes from recordings; with `auto` only by a sampler that is known to keep the picture."""
    if parameters.reuse is Reuse.OFF:
        return False
    sampler = parameters.sampler or family.schedule.default_sampler
    return parameters.reuse is Reuse.STRICT or not is_all_or_nothing(family.specs) or sampler in NEAR_TOGETHER


def form_of(config: DenoiserConfig, family: ModelFamily) -> CacheForm:
    """The configured form; keys and values where blocks have no use for their inputs."""
    configured = config.template_form
    return (
        configured if any(spec.channels([BlockMode(configured)]) for spec in family.specs) else CacheForm.KV
    )


def storage_budget(
    config: DenoiserConfig, family: ModelFamily, tokens: int, levels: int, least_levels: int = LEAST_LEVELS
) -> tuple[TemplateRunScope, int]:
    """Return what fits into the configured bytes and into a tier, and in which bits.

    `tokens` are those of the picture and its companions. What no tier holds would be recorded at every edit. Where
    blocks take together, none is left out: first the bits become fewer, then the levels.
    """
    disk_mb = 0 if config.template_folder is None else config.cache_disk_mb
    budget_mb = max(config.template_memory_mb, disk_mb)
    mode, whole = BlockMode(form_of(config, family)), is_all_or_nothing(family.specs)
    kept, bits = TemplateRunScope(0, family.depth), config.template_bits
    picture = -(-_picture_bytes(family, tokens) // family.depth)
    for bits in BITS[BITS.index(config.template_bits) :] if whole else (config.template_bits,):
        sizes = [
            picture + _block_bytes(spec, mode, bits, tokens, family.dtype.itemsize) for spec in family.specs
        ]
        kept = largest_scope_within(
            budget_mb << 20,
            levels=levels,
            blocks=1 if whole else family.depth,
            block_bytes=sum(sizes) if whole else max(sizes),
            least_levels=least_levels,
        )
        if kept == TemplateRunScope(levels, 0):
            break
    return (TemplateRunScope(kept.levels, kept.first_block * family.depth) if whole else kept), bits


def _picture_bytes(family: ModelFamily, tokens: int) -> int:
    """Bytes of the picture in a run's latent at one noise level, in a file; 0 where the network blends."""
    if family.network.blends:
        return 0
    channels = family.network.conditioning["image_latents"]
    return FILE_BYTES + stored_bytes(tokens, channels, EXACT, family.dtype.itemsize)


def _block_bytes(spec: BlockSpec, mode: BlockMode, bits: int, tokens: int, itemsize: int) -> int:
    """Bytes that a block keeps at one noise level, in a file."""
    return sum(
        FILE_BYTES
        + stored_bytes(
            tokens,
            spec.parts[part],
            bits_of(part, bits),
            torch.float32.itemsize if part == MOMENTS else itemsize,
        )
        for part in PARTS[mode]
        if part in spec.parts
    )


# Registered templates, and the runs that record.


TELL_S = 60.0
"""How long NATS may be away; after it the record stays as it is until the template is registered or edited again."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class PendingRegistration:
    """A registration that waits for a recording."""

    tenant: str
    template_id: str
    template_key: str


class TemplateRegistrations:
    """The records of registered templates, as a worker changes them."""

    def __init__(self, records: TemplateRecords, worker: str) -> None:
        self._records, self._worker = records, worker

    async def report(
        self, registered: PendingRegistration, outcome: int | GiornataError, *, only_waiting: bool = False
    ) -> None:
        """Write how many bytes are recorded, or why nothing is; with `only_waiting`, unless the record is settled."""

        def change(record: templates.TemplateRecord) -> templates.TemplateRecord | None:
            if only_waiting and record.state.settled:
                return None
            if isinstance(outcome, GiornataError):
                return templates.failed(record, self._worker, outcome.body())
            return templates.ready(record, self._worker, registered.template_key, outcome)

        try:
            await self._change(registered, change)
        except TemplateNotFound:
            log.info("template_deleted", template=registered.template_id)
        except Exception:  # the report's edge: logged; edits find the template without it
            log.exception("template_not_reported", template=registered.template_id)

    @retry_patiently(nats.errors.Error, TELL_S).wraps
    async def _change(
        self, registered: PendingRegistration, change: Change[templates.TemplateRecord]
    ) -> None:
        await self._records.change(registered.tenant, registered.template_id, change)


@dataclass(frozen=True, eq=False)
class _TemplateRun:
    """A run. A picture that is removed and edited again meanwhile has two runs; the first one no longer counts."""

    key: RowKey
    """The key of its row: the recording's id, and the number of the run in this process as the attempt."""
    outcome: asyncio.Future[CachedTemplate | GiornataError]
    """Resolves when the run has ended."""
    followed: set[PendingRegistration] = field(default_factory=set)
    """Registrations whose record is told how the run ends."""


class TemplateRuns:
    """The runs of one worker: background rows of its engine, begun and ended by `tasks`."""

    def __init__(
        self,
        config: DenoiserConfig,
        checkpoint: Checkpoint,
        blobs: BlobStore,
        store: TemplateStore,
        *,
        engine: RowEngine,
        registrations: TemplateRegistrations,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._config, self._checkpoint, self._blobs, self._store = config, checkpoint, blobs, store
        self._engine, self._registrations, self._tasks = engine, registrations, tasks
        self._admission = TemplateRunPolicy(1 if config.template_policy is TemplatePolicy.INLINE else 2)
        self._runs: dict[str, _TemplateRun] = {}
        """The runs that count, by recording."""
        self._numbers = count(1)
        self._recorded = self._failed = 0

    async def record(self, request: RecordRequest) -> None:
        """Record a registered template and tell its record how that ends."""
        inputs, tenant = request.inputs, request.template.tenant
        asked = await asyncio.to_thread(
            wanted_recording, self._config, self._checkpoint, tenant, inputs.inspection
        )
        registered = PendingRegistration(tenant, request.template.template_id, inputs.inspection.template_key)
        outcome: int | GiornataError | None = self._store.size_of(asked.recording_id)
        if not asked.fits:
            outcome = ServiceUnavailable("A template of this picture exceeds the denoiser's byte budget.")
        if outcome is not None:
            self._tasks.create_task(self._registrations.report(registered, outcome), name="registered")
            return
        self._follow(registered, self._run(asked, inputs))

    async def missed(
        self,
        asked: TemplateRunSpec,
        inputs: TemplateInputs,
        registered: PendingRegistration | None,
        *,
        known: bool,
        served: bool = False,
    ) -> CachedTemplate | None:
        """Begin a run for an edit that found nothing, where it is time; the recording, where the policy waits for it.

        The record of `registered` is told how the run ends. The picture may be `known` as registered without it. The
        edit may be `served` by what an earlier one left.
        """
        policy = self._config.template_policy
        if policy is TemplatePolicy.OFF:
            return None
        begun = asked.recording_id in self._runs
        if not begun and not self._admission.see(asked.recording_id, registered=known, served=served):
            return None
        run = self._run(asked, inputs)
        if registered is not None:
            self._follow(registered, run)
        if policy is not TemplatePolicy.INLINE:
            return None
        outcome = await asyncio.shield(run.outcome)
        return outcome if isinstance(outcome, CachedTemplate) else None

    def leaves(self, asked: TemplateRunSpec) -> bool:
        """Whether an edit that found nothing is to leave what it makes: no run is under way that records more."""
        background = self._config.template_policy is TemplatePolicy.BACKGROUND
        return background and asked.recording_id not in self._runs

    def remove(self, request: RemoveTemplate) -> None:
        """Forget all recordings of a picture, and runs that are under way; edits that run go on."""
        picture = picture_id(request.tenant, request.template_key)
        for run in [run for name, run in self._runs.items() if name.startswith(picture)]:
            self._engine.cancel(run.key.job_id, run.key.attempt)
            self._ended(run.key, TemplateNotFound())
        self._tasks.create_task(in_thread(self._store.remove_all, picture), name="remove")

    def advance(self, report: StepReport) -> None:
        """Take in what a step did to runs."""
        for row in report.advanced:
            if row.background and row.done:
                self._tasks.create_task(self._keep(row), name="template")
        for failure in report.failed:
            if failure.row.background:
                log.warning("template_failed", template=failure.row.key.job_id, error=str(failure.error))
                self._ended(failure.row.key, failure.error)

    def close(self) -> None:
        """End every run: no engine computes it any more."""
        for run in list(self._runs.values()):
            self._ended(run.key, ServiceUnavailable("The denoiser that was recording it has stopped."))

    def counters(self) -> TemplateCounters:
        """Return what templates have done so far."""
        return self._store.counted().model_copy(update={"recorded": self._recorded, "failed": self._failed})

    def _run(self, asked: TemplateRunSpec, inputs: TemplateInputs) -> _TemplateRun:
        """The run that makes a recording; it begins unless it is under way."""
        run = self._runs.get(asked.recording_id)
        if run is None:
            outcome: asyncio.Future[CachedTemplate | GiornataError] = (
                asyncio.get_running_loop().create_future()
            )
            run = _TemplateRun(RowKey(asked.recording_id, next(self._numbers), 0), outcome)
            self._runs[asked.recording_id] = run
            self._tasks.create_task(self._begin(run, asked, inputs), name="record")
        return run

    def _counts(self, key: RowKey) -> bool:
        """Return whether a run is the one that makes its recording: it has not ended, nor was the picture removed."""
        run = self._runs.get(key.job_id)
        return run is not None and run.key == key

    def _follow(self, registered: PendingRegistration, run: _TemplateRun) -> None:
        async def tell() -> None:
            outcome = await asyncio.shield(run.outcome)
            told = outcome.size_bytes if isinstance(outcome, CachedTemplate) else outcome
            await self._registrations.report(registered, told)

        if registered not in run.followed:
            run.followed.add(registered)
            self._tasks.create_task(tell(), name="registered")

    async def _begin(self, run: _TemplateRun, asked: TemplateRunSpec, inputs: TemplateInputs) -> None:
        try:
            row = await self._row(run.key, asked, inputs)
            if self._counts(run.key) and not self._engine.submit([row]):
                self._ended(run.key, ServiceUnavailable("The denoiser is stopping."))
        except GiornataError as error:
            log.warning("template_not_recorded", template=asked.recording_id, error=str(error))
            self._ended(run.key, error)
        except Exception:  # the task's edge: logged; edits go on without the recording
            log.exception("template_not_recorded", template=asked.recording_id)
            self._ended(run.key, InternalError())

    async def _row(self, key: RowKey, asked: TemplateRunSpec, inputs: TemplateInputs) -> Row:
        """The row that records `asked`: an empty mask and an empty prompt, from the noise that all edits share."""
        family, card = self._checkpoint.family, self._checkpoint.card
        text, conditioning = [
            tensors.unpack(await self._blobs.get(ref)) for ref in (inputs.empty_text, inputs.conditioning)
        ]
        shared = b"" if inputs.references is None else await self._blobs.get(inputs.references)

        def built() -> Row:
            noise = template_noise(*conditioning["noise"].shape)
            height, width = inputs.inspection.model_height, inputs.inspection.model_width
            row = build_row(
                family,
                key,
                grid=(height // card.pixel_multiple, width // card.pixel_multiple),
                track=asked.track,
                text=text,
                conditioning={
                    **family.network.unmasked(conditioning),
                    "noise": noise,
                    GENERATOR: template_generator(),
                },
                guidance_scale=card.embedded_guidance_scale,
                references=read_references(shared, inputs.inspection),
            )
            return replace(row, records=RecordingSpec(frozenset({asked.form}), asked.bits, asked.first_block))

        return await asyncio.to_thread(built)

    async def _keep(self, row: Row) -> None:
        recording = CachedTemplate(row.key.job_id, row.grid, row.entries)
        if not self._counts(row.key):
            return
        try:
            # What a step leaves is not where it is to lie.
            recording = await asyncio.to_thread(self._store.host.recording, recording)
            await self._put(recording)
            # A removal meanwhile holds; the recording of another run that began since may stay.
            if not self._counts(row.key) and recording.id not in self._runs:
                await asyncio.to_thread(self._store.remove_all, recording.id)
        except Exception:  # the task's edge: logged; edits go on without the recording
            log.exception("template_not_kept", template=recording.id)
            self._ended(row.key, InternalError())
        else:
            self._ended(row.key, recording)

    async def _put(self, recording: CachedTemplate) -> None:
        try:
            await asyncio.to_thread(self._store.put, recording)
        except OSError as error:
            log.warning("template_not_on_disk", template=recording.id, error=str(error))
        log.info("template_recorded", template=recording.id, size_bytes=recording.size_bytes)

    def _ended(self, key: RowKey, outcome: CachedTemplate | GiornataError) -> None:
        """End a run; one that no longer counts has ended already."""
        if self._counts(key):
            self._recorded += isinstance(outcome, CachedTemplate)
            self._failed += isinstance(outcome, GiornataError)
            self._runs.pop(key.job_id).outcome.set_result(outcome)


async def in_thread(work: Callable[..., object], *arguments: object) -> None:
    """Do `work` in a thread; a failure is logged, and costs time at most."""
    try:
        await asyncio.to_thread(work, *arguments)
    except Exception:  # the task's edge
        log.exception("template_work_failed")
