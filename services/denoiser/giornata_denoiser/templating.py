"""Templates at the edge: which one an edit takes from, and the runs that record them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import structlog
from torch import Tensor

from giornata import tensors
from giornata.blobs import BlobStore
from giornata.errors import GiornataError
from giornata.messages import RunRequest
from giornata.requests import Reuse
from giornata_denoiser.batch import RowKey
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.config import DenoiserConfig, TemplatePolicy
from giornata_denoiser.engine import StepReport
from giornata_denoiser.inputs import Reusing
from giornata_denoiser.loop import EngineLoop
from giornata_denoiser.reuse.admission import Admission
from giornata_denoiser.reuse.noise import template_noise
from giornata_denoiser.reuse.store import TemplateStore
from giornata_denoiser.reuse.template import Template
from giornata_denoiser.row import Recording, Row, build_row
from giornata_denoiser.sigmas import SigmaGrid, sigma_grid

RECORDER: Final = 1
"""Version of what template runs record; another one's are not taken from."""
ANYWHERE: Final = 1.0
SAME: Final = 1e-4
"""Tolerances of noise levels."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Wanted:
    """The template of one edit."""

    id: str
    grid: SigmaGrid
    """Noise levels of its run."""
    tolerance: float


class Templates:
    """What is recorded, and what is being recorded.

    Args:
        config: policy, form, bits and noise levels.
        checkpoint: that computes the runs.
        store: where templates are kept.
        engine: takes the runs as background rows.
        blobs: where inputs are.
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
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._config, self._checkpoint, self._store = config, checkpoint, store
        self._engine, self._blobs, self._tasks = engine, blobs, tasks
        self._admission = Admission(1 if config.template_policy is TemplatePolicy.INLINE else 2)
        self._runs: dict[str, asyncio.Future[Template | None]] = {}
        """By template: resolves when the run has ended."""

    async def of(self, request: RunRequest) -> Reusing | None:
        """How the rows of `request` reuse; begins to record where nothing is recorded and should be."""
        parameters = request.job.parameters
        if parameters.reuse is Reuse.OFF or request.encoding.empty_text is None:
            return None
        wanted = self.wanted(request)
        template = await asyncio.to_thread(self._store.find, wanted.id)
        if template is None and self._config.template_policy is not TemplatePolicy.OFF:
            template = await self._missed(request, wanted)
        return Reusing(parameters.halo, wanted.tolerance, template)

    def wanted(self, request: RunRequest) -> Wanted:
        """The template that `request` takes from, if it is recorded: its tenant's own.

        With `strict` it is one of the edit's own noise levels, otherwise one of the configured number of them.
        """
        config, job, inspection = self._config, request.job, request.inspection
        strict = job.parameters.reuse is Reuse.STRICT
        steps = (job.parameters.num_inference_steps if strict else None) or config.template_levels
        strength = (job.parameters.strength if strict else None) or 1.0
        grid = sigma_grid(
            self._checkpoint.scheduler, steps=steps, strength=strength, image_tokens=inspection.tokens
        )
        parts = (
            RECORDER,
            job.tenant,
            inspection.template_key,
            config.template_form,
            config.template_bits,
            [round(sigma, 6) for sigma in grid.sigmas.tolist()],
            self._guidance,
        )
        name = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
        return Wanted(name, grid, SAME if strict else ANYWHERE)

    def advance(self, report: StepReport) -> None:
        """Take in what a step did of template runs."""
        for row in report.advanced:
            if row.recording is not None and row.done:
                self._tasks.create_task(self._keep(row), name="template")
        for failure in report.failed:
            if failure.row.recording is not None:
                log.warning("template_failed", template=failure.row.key.job_id, error=str(failure.error))
                self._ended(failure.row.key.job_id, None)

    def close(self) -> None:
        """Nobody waits for a run any more."""
        for name in list(self._runs):
            self._ended(name, None)

    @property
    def _guidance(self) -> float:
        return self._checkpoint.card.default_guidance_scale or 0.0

    async def _missed(self, request: RunRequest, wanted: Wanted) -> Template | None:
        """Begin a run where it is time; the template, where the policy waits for it."""
        if wanted.id not in self._runs:
            if not self._admission.see(wanted.id):
                return None
            self._runs[wanted.id] = asyncio.get_running_loop().create_future()
            self._tasks.create_task(self._record(request, wanted), name="record")
        if self._config.template_policy is TemplatePolicy.INLINE:
            return await asyncio.shield(self._runs[wanted.id])
        return None

    async def _record(self, request: RunRequest, wanted: Wanted) -> None:
        try:
            row = await self._run_of(request, wanted)
            if not self._engine.submit([row]):
                self._ended(wanted.id, None)
        except GiornataError as error:
            log.warning("template_not_recorded", template=wanted.id, error=str(error))
            self._ended(wanted.id, None)
        except Exception:  # the task's edge: logged; edits go on without the template
            log.exception("template_not_recorded", template=wanted.id)
            self._ended(wanted.id, None)

    async def _run_of(self, request: RunRequest, wanted: Wanted) -> Row:
        """A background row: the picture with an empty mask and an empty prompt, from the noise that all edits share."""
        encoding = request.encoding
        if encoding.empty_text is None:
            raise ValueError("a template run needs the empty prompt")
        text, conditioning = [
            tensors.unpack(await self._blobs.get(ref)) for ref in (encoding.empty_text, encoding.rows[0])
        ]
        return await asyncio.to_thread(self._build, request, wanted, text, conditioning)

    def _build(
        self,
        request: RunRequest,
        wanted: Wanted,
        text: Mapping[str, Tensor],
        conditioning: Mapping[str, Tensor],
    ) -> Row:
        family, multiple = self._checkpoint.family, self._checkpoint.card.pixel_multiple
        inspection = request.inspection
        noise = template_noise(*conditioning["noise"].shape)
        row = build_row(
            family,
            RowKey(wanted.id, 0, 0),
            grid=(inspection.model_height // multiple, inspection.model_width // multiple),
            sigmas=wanted.grid,
            text=text,
            conditioning={**family.unmasked(conditioning), "noise": noise},
            guidance_scale=self._guidance,
        )
        config = self._config
        return replace(row, recording=Recording(frozenset({config.template_form}), config.template_bits))

    async def _keep(self, row: Row) -> None:
        template = Template(row.key.job_id, row.grid, row.entries)
        try:
            await asyncio.to_thread(self._store.put, template)
        except OSError as error:
            log.warning("template_not_on_disk", template=template.id, error=str(error))
        log.info("template_recorded", template=template.id, size_bytes=template.size_bytes)
        self._ended(template.id, template)

    def _ended(self, name: str, template: Template | None) -> None:
        run = self._runs.pop(name, None)
        if run is not None and not run.done():
            run.set_result(template)
