"""Recordings of pictures: the lookup of the one that an edit takes from, and the runs that make them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count

import nats.errors
import structlog

from giornata import tensors
from giornata.blobs import BlobStore
from giornata.deadlines import retry_patiently
from giornata.planning.cost_model import StepCosts
from giornata.records import Change, TemplateRecords
from giornata.scheduling.batch import RowKey
from giornata.scheduling.placement import TemplateRunPolicy
from giornata.wire import templates
from giornata.wire.errors import GiornataError, InternalError, ServiceUnavailable, TemplateNotFound
from giornata.wire.jobs import BlobRef, picture_id
from giornata.wire.messages import PrefetchTemplate, RecordRequest, RemoveTemplate, RunRequest
from giornata.wire.requests import Reuse
from giornata.wire.templates import TemplateInputs
from giornata.wire.workers import TemplateCounters
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.config import DenoiserConfig, TemplatePolicy, TextReusePolicy
from giornata_denoiser.engine.engine import RowEngine
from giornata_denoiser.engine.model_runner import StepReport
from giornata_denoiser.engine.recorders import renew_steps
from giornata_denoiser.families.rows import build_row, read_references
from giornata_denoiser.rows.row import GENERATOR, RecordingSpec, Row
from giornata_denoiser.rows.template import CachedTemplate, template_generator, template_noise
from giornata_denoiser.templates.identity import (
    ANYWHERE,
    TemplateRunSpec,
    takes_from_recordings,
    wanted_recording,
)
from giornata_denoiser.templates.store import CorrectionCache, TemplateStore

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
