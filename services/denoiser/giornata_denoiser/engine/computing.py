"""Computing steps of given rows over one family: who they are and when they share a step is decided elsewhere.

What is kept from step to step serves the next one alone: inputs on the device, slabs, the assembly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from giornata.packed.low_rank import SequenceLoras
from giornata.packed.tracing import UNTRACED, LaneTracer, TraceLane
from giornata.planning.operations import StepWork
from giornata.scheduling.batch import RowKey
from giornata.wire.errors import RowPoisoned
from giornata.wire.workers import StepSample
from giornata_denoiser.blocks.waits import WaitTimer
from giornata_denoiser.engine import results
from giornata_denoiser.engine.arriving import able
from giornata_denoiser.engine.checks import FiniteCheck, Judge, PendingFiniteChecks, judge_for
from giornata_denoiser.engine.controls import ControlExecutor, ControlLost, NoControls, controlled, wholly
from giornata_denoiser.engine.extrapolating import divided, joined, spread
from giornata_denoiser.engine.hosting import hosting_for
from giornata_denoiser.engine.low_ranks import LowRanks, NoLoras, acting, adapted
from giornata_denoiser.engine.placing import BatchAssembler
from giornata_denoiser.engine.protocol import FailedRow, StepReport
from giornata_denoiser.engine.sources import ReuseOptions, StepPlan, StepPlanner
from giornata_denoiser.engine.stepping import StepOutput, denoise_step, extrapolated_step
from giornata_denoiser.families.preview_map import PreviewMap
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.template import Entry


class _InFlightStep(NamedTuple):
    """A step that the device has been given."""

    verdict: FiniteCheck
    work: StepWork
    sample: StepSample | None
    began: float
    assemble_ms: float
    waited_ms: float
    controls_waited_ms: float
    waits_s: float
    """What all steps before it have waited for ControlNets."""


class ModelRunner:
    """Computes steps in the thread that calls it; see :class:`giornata_denoiser.engine.engine.Engine` for its parts.

    `ran_out` hears of rows whose step did not fit into memory together.
    """

    def __init__(
        self,
        family: ModelFamily,
        clock: Callable[[], float],
        preview_map: PreviewMap | None = None,
        *,
        reusing: ReuseOptions | None = None,
        trace: LaneTracer = UNTRACED,
        judge: Judge | None = None,
        low_ranks: LowRanks | None = None,
        controls: ControlExecutor | None = None,
        ran_out: Callable[[Sequence[Row]], object] = lambda _: None,
    ) -> None:
        self.family = family
        self._judge = judge or judge_for(family.device)
        self._checks = PendingFiniteChecks()
        self._given: _InFlightStep | None = None
        """The step that the device may not have ended."""
        self._ended_s, self._ended_waits_s = -math.inf, 0.0
        """When it ended the last one that has been waited for, and how long all had waited for ControlNets by then."""
        self._preview_map = preview_map
        how = reusing or ReuseOptions()
        self._model, self._learns = how.model, how.correction_bits is not None
        self._ran_out = ran_out
        self._clock, self._trace = clock, trace
        self._low_ranks = low_ranks or NoLoras()
        self._controls = controls or NoControls()
        self.placing = BatchAssembler(family)
        self._waits, self._control_waits = WaitTimer(clock), WaitTimer(clock)
        self.hosting = hosting_for(family.device, self._waits)
        self.sources = StepPlanner(family, how, self._waits, trace)
        """What plans the steps' use of templates."""

    def able(self, row: Row) -> Row | None:
        """`row` as it makes its next step; None while it has to wait for its LoRAs, or for its ControlNets."""
        now = able(row, self._low_ranks)
        return None if now is None else self._controls.able(now)

    def retain(self, joined: Collection[RowKey], present: Sequence[Row], *, resting: bool) -> None:
        """Forget all rows but these, and the assembly where the next step has no rows: the engine is `resting`.

        Rows that are `present` have made a step here, or will; those that have `joined` may have a part in the next.
        """
        self.sources.retain(joined)
        self._checks.retain([row.key for row in present])
        self._controls.retain(joined)
        self.placing.retain(joined, resting=resting)

    def rest(self, present: Collection[RowKey]) -> None:
        """Give back what steps have kept: slabs, inputs, assembly. Rows that go on have theirs made again.

        Verdicts on rows that are `present` are still read.
        """
        self._checks.retain(present)
        self._give_back()

    def compute(self, rows: tuple[Row, ...], *, roomy: bool = False) -> StepReport:
        """One step of `rows`; changes nothing but what is kept for the next one. `roomy`: nothing is left to give back.

        A GPU may still compute it: rows that the report calls advanced may then fail in the next one, and its sample is
        of the step before. A row that is done, shown or taught in this step is known to be finite.

        If the step raises, every row is computed alone: the culprit fails, the others do not notice. If memory was out,
        what is kept for rows and of templates is given back before, and later steps take fewer rows.

        Raises:
            torch.AcceleratorError: the device itself is lost, and no row can be blamed.
            Exception: other processes compute the step too, and whatever fails ends the group's.
        """
        began = self._clock()
        try:
            return self.attempt(rows)
        except torch.AcceleratorError:
            raise
        except ControlLost:  # its rows are no longer ready; the others repeat the step
            self._given = None  # how long the step before took cannot be told any more
            return StepReport(began, self._clock())
        except Exception as error:  # a row's edge: the row is answered with it, and the service logs it
            if self.family.group:  # the others would not compute the rows alone
                raise
            out_of_memory = isinstance(error, torch.OutOfMemoryError)
            plain = len(rows) == 1 and rows[0].template is None and not rows[0].renewed_every
            if plain and (roomy or not out_of_memory):
                return StepReport(
                    began, self._clock(), failed=(FailedRow(rows[0], results.row_error(error)),)
                )
        # Outside of the handler, since the traceback keeps the tensors of the failed step alive.
        if out_of_memory:
            if len(rows) > 1:
                self._ran_out(rows)
            self._give_back()
            self.sources.give_back()
            if self.family.device.type == "cuda":
                torch.cuda.empty_cache()
        if len(rows) == 1:  # what is taken is never the reason of a failure
            alone = rows[0] if plain else replace(rows[0], template=None, renewed_every=0, records=None)
            return self.compute((alone,), roomy=out_of_memory)
        parts = [self.compute((row,)) for row in rows]
        return StepReport(
            began,
            self._clock(),
            advanced=tuple(row for part in parts for row in part.advanced),
            failed=tuple(failure for part in parts for failure in part.failed),
            previews=tuple(preview for part in parts for preview in part.previews),
        )

    def attempt(self, rows: tuple[Row, ...]) -> StepReport:
        """One step of `rows` as :meth:`compute` begins it: what it raises blames no row, and nothing is tried again."""
        with self._trace.span(TraceLane.STEP, f"{len(rows)} rows"):
            return self._forward(rows)

    def _give_back(self) -> None:
        self.sources.rest()
        self._controls.retain(())
        self.placing.clear()

    def _forward(self, rows: tuple[Row, ...]) -> StepReport:
        began, waits_s = self._clock(), self._control_waits.total_s
        show, network = self._preview_map, self.family.network
        with torch.inference_mode():
            stepped, plan, assembled = self._made(rows)
            # (height, width, 3) uint8 on the device, of the rows that are shown after this step.
            pictures = [
                None if clean is None or show is None else show(network.unpacked(clean, row.grid))
                for row, clean in zip(rows, stepped.clean, strict=True)
            ]
            verdict = self._judge(stepped.latents)
        entries = self._hosted(rows, plan)
        given = _InFlightStep(
            verdict,
            plan.work,
            plan.sample,
            began,
            (assembled - began) * 1e3,
            self._waits.total_s * 1e3,
            (self._control_waits.total_s - waits_s) * 1e3,
            waits_s,
        )
        shown = any(picture is not None for picture in pictures)
        leaves = shown or any(plan.learning) or any(row.step + 1 >= row.steps for row in rows)
        poisoned, sample = self._judged(rows, given, leaves=leaves)
        good = [row.key not in poisoned for row in rows]
        return StepReport(
            began,
            self._clock(),
            results.advanced(rows, plan, stepped, entries, good),
            tuple(FailedRow(row, RowPoisoned()) for row in poisoned.values()),
            sample,
            results.previews(
                rows, [picture if fine else None for picture, fine in zip(pictures, good, strict=True)]
            ),
            results.cached_blocks(rows, stepped, self.family.depth),
        )

    def _made(self, rows: tuple[Row, ...]) -> tuple[StepOutput, StepPlan, float]:
        """What a step makes of `rows`, its plan, and when its forward was assembled."""
        low_ranks = tuple(acting(row, self._low_ranks) for row in rows)
        division = divided(rows, learns=self._learns)
        if not division.others:
            return self._computed(rows, low_ranks)
        computed, others = division.of(rows)
        of_computed, of_others = division.of(low_ranks)
        made = self._computed(computed, of_computed) if computed else None
        assembly = self.placing.beside(others, of_others)
        stepped = extrapolated_step(self.family, assembly, others, division.known)
        if made is None:
            return joined(division, None, stepped), spread(division, None), self._clock()
        skipped = self.family.depth * sum(len(row.prompts) for row in others)
        plan = spread(division, made[1].beside(skipped))
        return joined(division, made[0], stepped), plan, made[2]

    def _computed(
        self, rows: tuple[Row, ...], low_ranks: tuple[SequenceLoras | None, ...]
    ) -> tuple[StepOutput, StepPlan, float]:
        """:meth:`_made` of rows that the network computes."""
        assembly = self.placing.of(rows, low_ranks)
        assembled = self._clock()
        plan = self.sources.step(rows)
        self._waits.total_s = 0.0
        uses = adapted(plan.uses, rows, low_ranks)
        added = self._controls.residuals(rows, wholly(uses, rows), self._control_waits)
        uses = controlled(uses, rows, added)
        stepped = denoise_step(self.family, assembly, rows, uses, self._trace)
        return stepped, plan, assembled

    def _hosted(self, rows: Sequence[Row], plan: StepPlan) -> list[Entry | None]:
        """What the step has left behind of each row, on its way to host memory; that of a row that ends is there."""
        entries = [
            None if recorder is None else self.hosting.take(recorder.kept()) for recorder in plan.recording
        ]
        for row, entry in zip(rows, entries, strict=True):
            if row.records is not None and row.step + 1 >= row.steps:
                self.hosting.finish(row.entries if entry is None else (*row.entries, entry))
        return entries

    def _judged(
        self, rows: Sequence[Row], given: _InFlightStep, *, leaves: bool
    ) -> tuple[dict[RowKey, Row], StepSample | None]:
        """Rows that are not finite, as of their last good step, and the sample of the last step that has ended.

        The step that is `given` is judged in the next one, if the device is late and nothing of it leaves now.
        """
        sample = None if self._given is None else self._ended(self._given)
        self._given = None
        poisoned = self._checks.poisoned(rows)
        if given.verdict.late and not leaves:
            self._given = given
            self._checks.postpone(rows, given.verdict)
            return poisoned, sample
        sample = self._ended(given)
        for row, finite in zip(rows, given.verdict.read(), strict=True):
            if not finite:
                poisoned.setdefault(row.key, row)
        return poisoned, sample

    def _ended(self, given: _InFlightStep) -> StepSample | None:
        """The sample of a step, once the device has computed it: that is waited for. None where it computed nothing."""
        given.verdict.read()
        ended = self._clock()
        # The device begins a step when it has ended the one before.
        waits_s = self._control_waits.total_s
        waited_s = waits_s - (given.waits_s if given.began > self._ended_s else self._ended_waits_s)
        step_ms = (ended - max(given.began, self._ended_s) - waited_s) * 1e3
        self._ended_s, self._ended_waits_s = ended, waits_s
        if given.sample is None:
            return None
        if not given.sample.loaded_bytes:  # else part of it was waiting
            self._model.observe_step(given.work, step_ms)
        measured = {
            "assemble_ms": given.assemble_ms,
            "step_ms": step_ms,
            "waited_ms": given.waited_ms,
            "controls_waited_ms": given.controls_waited_ms,
        }
        return given.sample.model_copy(update=measured)
