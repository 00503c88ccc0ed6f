"""The lookup of the recording that an edit takes from, held in memory while it is used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import structlog

from giornata.planning.cost_model import StepCosts
from giornata.wire.jobs import BlobRef
from giornata.wire.messages import PrefetchTemplate, RunRequest
from giornata.wire.requests import Reuse
from giornata.wire.templates import TemplateInputs
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.config import DenoiserConfig, TextReusePolicy
from giornata_denoiser.engine.recorders import renew_steps
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import CachedTemplate
from giornata_denoiser.templates.identity import (
    ANYWHERE,
    TemplateRunSpec,
    takes_from_recordings,
    wanted_recording,
)
from giornata_denoiser.templates.runs import (
    PendingRegistration,
    TemplateRegistrations,
    TemplateRuns,
    in_thread,
)
from giornata_denoiser.templates.store import CorrectionCache, TemplateStore

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
            if not row.taught or row.tolerance != ANYWHERE or row.template is None:
                continue
            if self._store.has(row.template) and self._store.corrections.claim(row):
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
