"""Templates at the edge: which one an edit takes from, and the runs that record them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import structlog
from torch import Tensor

from giornata import tensors
from giornata.blobs import BlobStore
from giornata.errors import GiornataError, InternalError, ServiceUnavailable, TemplateNotFound
from giornata.jobs import BlobRef, Inspection
from giornata.messages import PrefetchTemplate, RecordRequest, RemoveTemplate, RunRequest
from giornata.planning.costs import StepCosts
from giornata.requests import Reuse
from giornata.workers import TemplateCounters
from giornata_denoiser.batch import RowKey
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.config import DenoiserConfig, TemplatePolicy
from giornata_denoiser.engine import StepReport
from giornata_denoiser.inputs import Reusing
from giornata_denoiser.loop import EngineLoop
from giornata_denoiser.registered import Registered, Report
from giornata_denoiser.reuse.admission import Admission
from giornata_denoiser.reuse.identity import ANYWHERE, Wanted, picture_id, wanted
from giornata_denoiser.reuse.noise import template_noise
from giornata_denoiser.reuse.store import TemplateStore
from giornata_denoiser.reuse.template import Template
from giornata_denoiser.row import Recording, Row, build_row

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Source:
    """What a run is computed from."""

    inspection: Inspection
    empty_text: BlobRef
    conditioning: BlobRef
    """Of any edit of the picture."""


class Templates:
    """What is recorded, and what is being recorded.

    Args:
        config: policy, form, bits and noise levels.
        checkpoint: that computes the runs.
        store: where templates are kept.
        engine: takes the runs as background rows.
        blobs: where inputs are.
        report: tells how the recording of a registered template has ended.
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
        report: Report,
        costs: Callable[[], StepCosts],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._config, self._checkpoint, self._store = config, checkpoint, store
        self._engine, self._blobs, self._report, self._tasks = engine, blobs, report, tasks
        self._costs = costs
        self._admission = Admission(1 if config.template_policy is TemplatePolicy.INLINE else 2)
        self._runs: dict[str, asyncio.Future[Template | GiornataError]] = {}
        """By template: resolves when the run has ended."""
        self._recorded = self._failed = 0

    async def of(self, request: RunRequest) -> Reusing | None:
        """How the rows of `request` reuse; begins to record where nothing is recorded and should be."""
        job = request.job
        if job.parameters.reuse is Reuse.OFF or request.encoding.empty_text is None:
            return None
        asked = wanted(self._config, self._checkpoint, job.tenant, request.inspection, job.parameters)
        costs = self._costs()
        if asked.first_block >= self._checkpoint.family.blocks:  # no byte of it fits
            return Reusing(job.parameters.halo, asked.tolerance, None, costs)
        template = await asyncio.to_thread(self._store.find, asked.id)
        if template is None and self._config.template_policy is not TemplatePolicy.OFF:
            template = await self._missed(request, asked, request.encoding.empty_text)
        return Reusing(job.parameters.halo, asked.tolerance, template, costs)

    def held(self, request: RunRequest) -> AbstractContextManager[None]:
        """Keeps the template that the rows of `request` take from in memory meanwhile, from when it is there."""
        job = request.job
        if job.parameters.reuse is Reuse.OFF:
            return nullcontext()
        asked = wanted(self._config, self._checkpoint, job.tenant, request.inspection, job.parameters)
        return self._store.pinned(asked.id)

    def record(self, request: RecordRequest) -> None:
        """Record a registered template and tell its record how that ends."""
        inputs = request.inputs
        asked = wanted(self._config, self._checkpoint, request.template.tenant, inputs.inspection)
        registered = Registered(
            request.template.tenant, request.template.template_id, inputs.inspection.template_key
        )
        size_bytes = self._store.size_of(asked.id)
        outcome: int | GiornataError | None = size_bytes
        if asked.first_block >= self._checkpoint.family.blocks:
            outcome = ServiceUnavailable("A template of this picture exceeds the denoiser's byte budget.")
        if outcome is not None:
            self._tasks.create_task(self._report(registered, outcome), name="registered")
            return
        source = Source(inputs.inspection, inputs.empty_text, inputs.conditioning)
        self._follow(registered, self._run(asked, source))

    def prefetch(self, request: PrefetchTemplate) -> None:
        """Read what is on disk for an edit into memory: it is about to come."""
        job = request.job
        asked = wanted(self._config, self._checkpoint, job.tenant, request.inspection, job.parameters)
        self._tasks.create_task(_beside(self._store.prefetch, asked.id), name="prefetch")

    def remove(self, request: RemoveTemplate) -> None:
        """Forget all recordings of a picture, and those that are under way; rows that run go on."""
        picture = picture_id(request.tenant, request.template_key)
        for name in [name for name in self._runs if name.startswith(picture)]:
            self._engine.cancel(name)
            self._ended(name, TemplateNotFound())
        self._tasks.create_task(_beside(self._store.remove_all, picture), name="remove")

    def advance(self, report: StepReport) -> None:
        """Take in what a step did of template runs."""
        for row in report.advanced:
            if row.recording is not None and row.done:
                self._tasks.create_task(self._keep(row), name="template")
        for failure in report.failed:
            if failure.row.recording is not None:
                log.warning("template_failed", template=failure.row.key.job_id, error=str(failure.error))
                self._ended(failure.row.key.job_id, failure.error)

    def close(self) -> None:
        """Nobody waits for a run any more."""
        for name in list(self._runs):
            self._ended(name, ServiceUnavailable("The denoiser that was recording it has stopped."))

    def counters(self) -> TemplateCounters:
        """What templates have done so far."""
        return self._store.counted().model_copy(update={"recorded": self._recorded, "failed": self._failed})

    async def _missed(self, request: RunRequest, asked: Wanted, empty_text: BlobRef) -> Template | None:
        """Begin a run where it is time; the template, where the policy waits for it."""
        job, inspection = request.job, request.inspection
        run = self._runs.get(asked.id)
        if run is None:
            if not self._admission.see(asked.id, registered=job.template_id is not None):
                return None
            run = self._run(asked, Source(inspection, empty_text, request.encoding.rows[0]))
            if job.template_id is not None and asked.tolerance == ANYWHERE:
                self._follow(Registered(job.tenant, job.template_id, inspection.template_key), run)
        if self._config.template_policy is not TemplatePolicy.INLINE:
            return None
        outcome = await asyncio.shield(run)
        return outcome if isinstance(outcome, Template) else None

    def _run(self, asked: Wanted, source: Source) -> asyncio.Future[Template | GiornataError]:
        """The run that records a template, begun unless it is under way."""
        if asked.id not in self._runs:
            self._runs[asked.id] = asyncio.get_running_loop().create_future()
            self._tasks.create_task(self._begin(asked, source), name="record")
        return self._runs[asked.id]

    def _follow(self, registered: Registered, run: asyncio.Future[Template | GiornataError]) -> None:
        async def tell() -> None:
            outcome = await asyncio.shield(run)
            await self._report(registered, outcome.size_bytes if isinstance(outcome, Template) else outcome)

        self._tasks.create_task(tell(), name="registered")

    async def _begin(self, asked: Wanted, source: Source) -> None:
        try:
            row = await self._row(asked, source)
        except GiornataError as error:
            log.warning("template_not_recorded", template=asked.id, error=str(error))
            self._ended(asked.id, error)
        except Exception:  # the task's edge: logged; edits go on without the template
            log.exception("template_not_recorded", template=asked.id)
            self._ended(asked.id, InternalError())
        else:
            if asked.id in self._runs and not self._engine.submit([row]):
                self._ended(asked.id, ServiceUnavailable("The denoiser is stopping."))

    async def _row(self, asked: Wanted, source: Source) -> Row:
        """A background row: the picture with an empty mask and an empty prompt, from the noise that all edits share."""
        text, conditioning = [
            tensors.unpack(await self._blobs.get(ref)) for ref in (source.empty_text, source.conditioning)
        ]
        return await asyncio.to_thread(self._build, asked, source.inspection, text, conditioning)

    def _build(
        self,
        asked: Wanted,
        inspection: Inspection,
        text: Mapping[str, Tensor],
        conditioning: Mapping[str, Tensor],
    ) -> Row:
        family, card = self._checkpoint.family, self._checkpoint.card
        noise = template_noise(*conditioning["noise"].shape)
        row = build_row(
            family,
            RowKey(asked.id, 0, 0),
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
        if template.id not in self._runs:  # removed meanwhile
            return
        try:
            await asyncio.to_thread(self._store.put, template)
        except OSError as error:
            log.warning("template_not_on_disk", template=template.id, error=str(error))
        if template.id not in self._runs:
            await asyncio.to_thread(self._store.remove_all, template.id)
            return
        log.info("template_recorded", template=template.id, size_bytes=template.size_bytes)
        self._ended(template.id, template)

    def _ended(self, name: str, outcome: Template | GiornataError) -> None:
        run = self._runs.pop(name, None)
        if run is not None and not run.done():
            self._recorded += isinstance(outcome, Template)
            self._failed += isinstance(outcome, GiornataError)
            run.set_result(outcome)


async def _beside(work: Callable[[str], None], name: str) -> None:
    """`work` in a thread; that it fails is logged, and costs time at most."""
    try:
        await asyncio.to_thread(work, name)
    except Exception:  # the task's edge
        log.exception("template_work_failed", template=name)
