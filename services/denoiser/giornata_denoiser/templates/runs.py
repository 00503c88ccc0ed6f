"""Templates at the edge: which one an edit takes from, and the runs that record them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import structlog
from torch import Tensor

from giornata import tensors
from giornata.blobs import BlobStore
from giornata.planning.costs import StepCosts
from giornata.scheduling.batch import RowKey
from giornata.scheduling.recording import Admission
from giornata.wire.errors import GiornataError, InternalError, ServiceUnavailable, TemplateNotFound
from giornata.wire.jobs import BlobRef, Inspection
from giornata.wire.messages import PrefetchTemplate, RecordRequest, RemoveTemplate, RunRequest
from giornata.wire.requests import EditParameters, Reuse
from giornata.wire.templates import picture_id
from giornata.wire.workers import LoadSample, TemplateCounters, Tier
from giornata_denoiser.attempts.inputs import Reusing
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.config import DenoiserConfig, TemplatePolicy
from giornata_denoiser.engine.engine import StepReport
from giornata_denoiser.engine.loop import EngineLoop
from giornata_denoiser.rows.noise import template_noise
from giornata_denoiser.rows.row import Recording, Row, build_row
from giornata_denoiser.rows.template import Template
from giornata_denoiser.templates.identity import ANYWHERE, Wanted, wanted
from giornata_denoiser.templates.registered import Registered, Registrations
from giornata_denoiser.templates.store import TemplateStore

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Source:
    """What a run is computed from."""

    inspection: Inspection
    empty_text: BlobRef
    conditioning: BlobRef
    """Of any edit of the picture."""


@dataclass(frozen=True, eq=False)
class _Run:
    """A template run: a template that is removed and edited again meanwhile has two, of which the first is void."""

    key: RowKey
    """Of its row; the attempt counts the runs of this process."""
    outcome: asyncio.Future[Template | GiornataError]
    """Resolves when it has ended."""
    followed: set[Registered] = field(default_factory=set)
    """Registrations whose record is told how it ends."""


class Templates:
    """What is recorded, and what is being recorded.

    Args:
        config: policy, form, bits and noise levels.
        checkpoint: that computes the runs.
        store: where templates are kept.
        engine: takes the runs as background rows.
        blobs: where inputs are.
        registrations: are told how the recording of a registered template has ended.
        costs: of steps, as they are known now.
        tasks: owner of the tasks that begin and end runs.
    """

    def __init__(
        self,
        config: DenoiserConfig,
        checkpoint: Checkpoint,
        store: TemplateStore,
        *,
        engine: EngineLoop,
        blobs: BlobStore,
        registrations: Registrations,
        costs: Callable[[], StepCosts],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._config, self._checkpoint, self._store = config, checkpoint, store
        self._engine, self._blobs, self._registrations, self._tasks = engine, blobs, registrations, tasks
        self._costs = costs
        self._admission = Admission(1 if config.template_policy is TemplatePolicy.INLINE else 2)
        self._runs: dict[str, _Run] = {}
        """By template: those that count."""
        self._numbers = count(1)
        self._recorded = self._failed = 0

    @asynccontextmanager
    async def held(self, request: RunRequest) -> AsyncIterator[Reusing | None]:
        """How the rows of `request` reuse; begins to record where nothing is recorded and should be.

        What they take from stays in memory meanwhile, from when it is there.

        Raises:
            InvalidField: the edit has no step to compute.
        """
        job, empty_text = request.job, request.encoding.empty_text
        if job.parameters.reuse is Reuse.OFF or empty_text is None:
            yield None
            return
        asked = await self._wanted(job.tenant, request.inspection, job.parameters)
        with self._store.pinned(asked.id):
            template = None
            if asked.first_block < self._checkpoint.family.blocks:  # otherwise no byte of it fits
                template = await self._of(request, asked, empty_text)
            yield Reusing(job.parameters.halo, asked.tolerance, template, self._costs())

    async def record(self, request: RecordRequest) -> None:
        """Record a registered template and tell its record how that ends."""
        inputs = request.inputs
        asked = await self._wanted(request.template.tenant, inputs.inspection)
        registered = Registered(
            request.template.tenant, request.template.template_id, inputs.inspection.template_key
        )
        size_bytes = self._store.size_of(asked.id)
        outcome: int | GiornataError | None = size_bytes
        if asked.first_block >= self._checkpoint.family.blocks:
            outcome = ServiceUnavailable("A template of this picture exceeds the denoiser's byte budget.")
        if outcome is not None:
            self._tasks.create_task(self._registrations.report(registered, outcome), name="registered")
            return
        source = Source(inputs.inspection, inputs.empty_text, inputs.conditioning)
        self._follow(registered, self._run(asked, source))

    def prefetch(self, request: PrefetchTemplate) -> None:
        """Read what is on disk for an edit into memory: it is about to come."""
        job = request.job

        def work() -> None:
            asked = wanted(self._config, self._checkpoint, job.tenant, request.inspection, job.parameters)
            self._store.prefetch(asked.id)

        self._tasks.create_task(_beside(work), name="prefetch")

    def remove(self, request: RemoveTemplate) -> None:
        """Forget all recordings of a picture, and those that are under way; rows that run go on."""
        picture = picture_id(request.tenant, request.template_key)
        for run in [run for name, run in self._runs.items() if name.startswith(picture)]:
            self._engine.cancel(run.key.job_id, run.key.attempt)
            self._ended(run.key, TemplateNotFound())
        self._tasks.create_task(_beside(partial(self._store.remove_all, picture)), name="remove")

    def advance(self, report: StepReport) -> None:
        """Take in what a step did of template runs."""
        for row in report.advanced:
            if row.recording is not None and row.done:
                self._tasks.create_task(self._keep(row), name="template")
        for failure in report.failed:
            if failure.row.recording is not None:
                log.warning("template_failed", template=failure.row.key.job_id, error=str(failure.error))
                self._ended(failure.row.key, failure.error)

    def close(self) -> None:
        """Nobody waits for a run any more."""
        for run in list(self._runs.values()):
            self._ended(run.key, ServiceUnavailable("The denoiser that was recording it has stopped."))

    def counters(self) -> TemplateCounters:
        """What templates have done so far."""
        return self._store.counted().model_copy(update={"recorded": self._recorded, "failed": self._failed})

    def resident(self) -> dict[Tier, tuple[str, ...]]:
        """Pictures whose templates are here, as telemetry tells them."""
        return self._store.resident()

    def reads(self) -> tuple[LoadSample, ...]:
        """Templates that were read from disk since the last call, the latest of them."""
        return self._store.taken_reads()

    async def _wanted(
        self, tenant: str, inspection: Inspection, parameters: EditParameters | None = None
    ) -> Wanted:
        """In a worker thread: noise levels take a scheduler's making."""
        return await asyncio.to_thread(wanted, self._config, self._checkpoint, tenant, inspection, parameters)

    async def _of(self, request: RunRequest, asked: Wanted, empty_text: BlobRef) -> Template | None:
        """The template that an edit takes from; without one it computes everything."""
        job, registered = request.job, None
        if job.template_id is not None and asked.tolerance == ANYWHERE:
            registered = Registered(job.tenant, job.template_id, request.inspection.template_key)
        template = await self._found(asked.id)
        if template is not None and registered is not None:  # whoever was to record it may have died
            told = self._registrations.found(registered, template.size_bytes)
            self._tasks.create_task(told, name="registered")
        if template is None and self._config.template_policy is not TemplatePolicy.OFF:
            source = Source(request.inspection, empty_text, request.encoding.rows[0])
            template = await self._missed(asked, source, registered, known=job.template_id is not None)
        return template

    async def _found(self, name: str) -> Template | None:
        try:
            return await asyncio.to_thread(self._store.find, name)
        except Exception:  # the edge of edits: logged; they go on without the template
            log.exception("template_not_read", template=name)
            return None

    async def _missed(
        self, asked: Wanted, source: Source, registered: Registered | None, *, known: bool
    ) -> Template | None:
        """Begin a run where it is time; the template, where the policy waits for it.

        Args:
            asked: what is missing.
            source: of its run.
            registered: whose record is told how that ends.
            known: whether the picture is registered.
        """
        if asked.id not in self._runs and not self._admission.see(asked.id, registered=known):
            return None
        run = self._run(asked, source)
        if registered is not None:
            self._follow(registered, run)
        if self._config.template_policy is not TemplatePolicy.INLINE:
            return None
        outcome = await asyncio.shield(run.outcome)
        return outcome if isinstance(outcome, Template) else None

    def _run(self, asked: Wanted, source: Source) -> _Run:
        """The run that records a template, begun unless it is under way."""
        run = self._runs.get(asked.id)
        if run is None:
            outcome: asyncio.Future[Template | GiornataError] = asyncio.get_running_loop().create_future()
            run = self._runs[asked.id] = _Run(RowKey(asked.id, next(self._numbers), 0), outcome)
            self._tasks.create_task(self._begin(run, asked, source), name="record")
        return run

    def _counts(self, key: RowKey) -> bool:
        """Whether a run is the one that records its template: it has not ended, nor was the template removed."""
        run = self._runs.get(key.job_id)
        return run is not None and run.key == key

    def _follow(self, registered: Registered, run: _Run) -> None:
        async def tell() -> None:
            outcome = await asyncio.shield(run.outcome)
            told = outcome.size_bytes if isinstance(outcome, Template) else outcome
            await self._registrations.report(registered, told)

        if registered not in run.followed:
            run.followed.add(registered)
            self._tasks.create_task(tell(), name="registered")

    async def _begin(self, run: _Run, asked: Wanted, source: Source) -> None:
        try:
            row = await self._row(run.key, asked, source)
            if self._counts(run.key) and not self._engine.submit([row]):
                self._ended(run.key, ServiceUnavailable("The denoiser is stopping."))
        except GiornataError as error:
            log.warning("template_not_recorded", template=asked.id, error=str(error))
            self._ended(run.key, error)
        except Exception:  # the task's edge: logged; edits go on without the template
            log.exception("template_not_recorded", template=asked.id)
            self._ended(run.key, InternalError())

    async def _row(self, key: RowKey, asked: Wanted, source: Source) -> Row:
        """A background row: the picture with an empty mask and an empty prompt, from the noise that all edits share."""
        text, conditioning = [
            tensors.unpack(await self._blobs.get(ref)) for ref in (source.empty_text, source.conditioning)
        ]
        return await asyncio.to_thread(self._build, key, asked, source.inspection, text, conditioning)

    def _build(
        self,
        key: RowKey,
        asked: Wanted,
        inspection: Inspection,
        text: Mapping[str, Tensor],
        conditioning: Mapping[str, Tensor],
    ) -> Row:
        family, card = self._checkpoint.family, self._checkpoint.card
        noise = template_noise(*conditioning["noise"].shape)
        row = build_row(
            family,
            key,
            grid=(
                inspection.model_height // card.pixel_multiple,
                inspection.model_width // card.pixel_multiple,
            ),
            sigmas=asked.grid,
            text=text,
            conditioning={**family.unmasked(conditioning), "noise": noise},
            guidance_scale=card.default_guidance_scale or 0.0,
        )
        config = self._config
        forms = frozenset({config.template_form})
        return replace(row, recording=Recording(forms, config.template_bits, asked.first_block))

    async def _keep(self, row: Row) -> None:
        template = Template(row.key.job_id, row.grid, row.entries)
        if not self._counts(row.key):  # removed meanwhile
            return
        try:
            await self._put(template)
            if not self._counts(row.key) and template.id not in self._runs:  # another run's may stay
                await asyncio.to_thread(self._store.remove_all, template.id)
        except Exception:  # the task's edge: logged; edits go on without the template
            log.exception("template_not_kept", template=template.id)
            self._ended(row.key, InternalError())
        else:
            self._ended(row.key, template)

    async def _put(self, template: Template) -> None:
        try:
            await asyncio.to_thread(self._store.put, template)
        except OSError as error:
            log.warning("template_not_on_disk", template=template.id, error=str(error))
        log.info("template_recorded", template=template.id, size_bytes=template.size_bytes)

    def _ended(self, key: RowKey, outcome: Template | GiornataError) -> None:
        """A run that counts no more has ended already."""
        if self._counts(key):
            self._recorded += isinstance(outcome, Template)
            self._failed += isinstance(outcome, GiornataError)
            self._runs.pop(key.job_id).outcome.set_result(outcome)


async def _beside(work: Callable[[], None]) -> None:
    """`work` in a thread; that it fails is logged, and costs time at most."""
    try:
        await asyncio.to_thread(work)
    except Exception:  # the task's edge
        log.exception("template_work_failed")
