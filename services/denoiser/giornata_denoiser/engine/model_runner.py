"""Computing steps of given rows over one family: what they make, and whether that is finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from giornata.packed.packing import UNTRACED, LaneTracer, TraceLane
from giornata.planning.operations import StepWork
from giornata.scheduling.batch import RowKey
from giornata.wire.errors import GiornataError, InternalError, RowPoisoned
from giornata.wire.workers import StepCacheCounters, StepSample
from giornata_denoiser.engine.batch_tensors import (
    BatchAssembler,
    ControlLost,
    ControlPart,
    LoraNotLoaded,
    LoraPart,
    LowRanks,
    with_low_ranks,
)
from giornata_denoiser.engine.denoise_step import RowOutput, denoise_step, extrapolated_step
from giornata_denoiser.engine.loading import hosting_for
from giornata_denoiser.engine.slabs import WaitTimer
from giornata_denoiser.engine.step_plan import ReuseOptions, StepPlan, StepPlanner
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.families.preview_map import PreviewMap
from giornata_denoiser.rows.parts import TaylorExpansion, extrapolated
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.template import Entry


@dataclass(frozen=True, eq=False)
class RowPreview:
    """The clean picture that a row predicts after a step."""

    key: RowKey
    step: int
    """Steps computed, 1 for the first."""
    steps: int
    index: int
    """0 for the row's first preview."""
    pixels: npt.NDArray[np.uint8]
    """(height, width, 3) RGB, one pixel per latent pixel."""


@dataclass(frozen=True, eq=False)
class FailedRow:
    """A row that could not be computed, as of its last good step. The error's cause is what was raised."""

    row: Row
    error: GiornataError


@dataclass(frozen=True, eq=False)
class StepReport:
    """A report of one step: its rows, its time, and what it took and loaded."""

    began_s: float
    ended_s: float
    advanced: tuple[Row, ...] = ()
    """Rows as they are now; rows that are `done` have left."""
    failed: tuple[FailedRow, ...] = ()
    sample: StepSample | None = None
    """Sample of the last step known to have ended. None for a step that had to be taken apart, whose times
    say nothing, and where none has ended since the last report."""
    previews: tuple[RowPreview, ...] = ()
    cached: StepCacheCounters = field(default_factory=StepCacheCounters)
    """Blocks of rows with step caches in this step."""


def row_error(cause: Exception) -> GiornataError:
    """Return how a row that raised when it was computed alone is answered."""
    if isinstance(cause, torch.OutOfMemoryError):
        error: GiornataError = InternalError("The denoiser ran out of memory on this picture.")
    elif isinstance(cause, LoraNotLoaded):
        error = InternalError("A LoRA of this picture was not loaded.")
    else:
        error = RowPoisoned("The denoiser could not compute this picture.")
    error.__cause__ = cause
    return error


class FiniteCheck:
    """A check that each of some latents, (tokens, channels) each, is finite. A CPU knows at once."""

    late = False
    """Whether :meth:`read` may have to wait for the device."""

    def __init__(self, latents: Sequence[Tensor]) -> None:
        # A sum in float64 is finite if all terms of a smaller dtype are; it takes one kernel a latent.
        self._finite = torch.stack([latent.sum(dtype=torch.float64) for latent in latents]).isfinite()

    def read(self) -> list[bool]:
        """The answer for each latent; waits until all are known."""
        finite: list[bool] = self._finite.tolist()
        return finite


class LateFiniteCheck(FiniteCheck):
    """The verdict of a CUDA device: copied to pinned memory, and read once an event has passed.

    It is read one step late, so that the device never waits for the host: the engine gives it the next step before. A
    row that leaves the engine, is shown, or teaches others is read at once.
    """

    late = True

    def __init__(self, latents: Sequence[Tensor]) -> None:
        super().__init__(latents)
        self._host = torch.empty(len(latents), dtype=torch.bool, pin_memory=True)
        self._host.copy_(self._finite, non_blocking=True)
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's is not typed
        self._event.record()

    def read(self) -> list[bool]:
        """The answer for each latent; waits for this step, and not for the next one."""
        self._event.synchronize()
        finite: list[bool] = self._host.tolist()
        return finite


Judge = Callable[[Sequence[Tensor]], FiniteCheck]
"""Makes the verdict on a step's latents."""


class _UnreadFiniteCheck(NamedTuple):
    before: Row
    """The row as it was before the step."""
    verdict: FiniteCheck
    place: int
    """The row's index in the step."""


class _InFlightStep(NamedTuple):
    """A step that the device has been given."""

    verdict: FiniteCheck
    work: StepWork
    sample: StepSample | None
    measured: dict[str, float]
    """Fields of the sample."""
    began: float
    waits_s: float
    """What all steps before it have waited for ControlNets."""


class ModelRunner:
    """Computes steps in the thread that calls it; see :class:`giornata_denoiser.engine.engine.Engine` for its parts.

    What is kept from step to step serves the next one alone: inputs on the device, slabs, the assembly. `ran_out` hears
    of rows whose step did not fit into memory together.
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
        controls: ControlPart | None = None,
        ran_out: Callable[[Sequence[Row]], object] = lambda _: None,
    ) -> None:
        self.family = family
        self._judge = judge or (LateFiniteCheck if family.device.type == "cuda" else FiniteCheck)
        self._unread: dict[RowKey, _UnreadFiniteCheck] = {}
        self._given: _InFlightStep | None = None
        """The step that the device may not have ended."""
        self._ended_s, self._ended_waits_s = -math.inf, 0.0
        """When it ended the last one that has been waited for, and how long all had waited for ControlNets by then."""
        self._preview_map = preview_map
        how = reusing or ReuseOptions()
        self._model, self._learns = how.model, how.correction_bits is not None
        self._ran_out = ran_out
        self._clock, self._trace = clock, trace
        self._loras, self._controls = LoraPart(low_ranks), controls or ControlPart()
        self.placing = BatchAssembler(family, self._loras)
        self._waits, self._control_waits = WaitTimer(clock), WaitTimer(clock)
        self.hosting = hosting_for(family.device, self._waits)
        self.sources = StepPlanner(family, how, self._waits, trace)
        """What plans the steps' use of templates."""

    def able(self, row: Row) -> Row | None:
        """`row` as it makes its next step; None while it has to wait for its LoRAs, or for its ControlNets."""
        now = self._loras.able(row)
        return None if now is None else self._controls.able(now)

    def retain(self, joined: Collection[RowKey], present: Sequence[Row], *, resting: bool) -> None:
        """Forget all rows but these, and the assembly where the next step has no rows: the engine is `resting`.

        Rows that are `present` have made a step here, or will; those that have `joined` may have a part in the next.
        """
        self.sources.retain(joined)
        self._forget_checks([row.key for row in present])
        self._controls.retain(joined)
        self.placing.retain(joined, resting=resting)

    def rest(self, present: Collection[RowKey]) -> None:
        """Give back what steps have kept: slabs, inputs, assembly. Rows that go on have theirs made again.

        Verdicts on rows that are `present` are still read.
        """
        self._forget_checks(present)
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
            plain = len(rows) == 1 and rows[0].reuse.template is None and not rows[0].reuse.renewed_every
            if plain and (roomy or not out_of_memory):
                return StepReport(began, self._clock(), failed=(FailedRow(rows[0], row_error(error)),))
        # Outside of the handler, since the traceback keeps the tensors of the failed step alive.
        if out_of_memory:
            if len(rows) > 1:
                self._ran_out(rows)
            self._give_back()
            self.sources.give_back()
            if self.family.device.type == "cuda":
                torch.cuda.empty_cache()
        if len(rows) == 1:  # what is taken is never the reason of a failure
            alone = rows[0] if plain else rows[0].plain()
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

    @property
    def keys(self) -> frozenset[RowKey]:
        """Rows of which anything is held."""
        return self.sources.keys | self.placing.keys | self._unread.keys()

    def _give_back(self) -> None:
        self.sources.rest()
        self._controls.retain(())
        self.placing.retain((), resting=True)

    def _forget_checks(self, present: Collection[RowKey]) -> None:
        for key in self._unread.keys() - present:
            del self._unread[key]

    def _forward(self, rows: tuple[Row, ...]) -> StepReport:
        began, waits_s = self._clock(), self._control_waits.total_s
        show, network, depth = self._preview_map, self.family.network, self.family.depth
        with torch.inference_mode():
            stepped, plan, assembled = self._made(rows)
            # (height, width, 3) uint8 on the device, of the rows that are shown after this step.
            pictures = [
                None if each.clean is None or show is None else show(network.unpacked(each.clean, row.grid))
                for row, each in zip(rows, stepped, strict=True)
            ]
            verdict = self._judge([each.latent for each in stepped])
        entries = self._hosted(rows, plan)
        measured = {
            "assemble_ms": (assembled - began) * 1e3,
            "waited_ms": self._waits.total_s * 1e3,
            "controls_waited_ms": (self._control_waits.total_s - waits_s) * 1e3,
        }
        given = _InFlightStep(verdict, plan.work, plan.sample, measured, began, waits_s)
        shown = bool([picture for picture in pictures if picture is not None])
        leaves = (
            shown
            or bool(plan.learning)
            or bool([row for row in rows if row.step + 1 >= len(row.track.times)])
        )
        poisoned, sample = self._judged(rows, given, leaves=leaves)
        advanced: list[Row] = []
        previews: list[RowPreview] = []
        computed = skipped = 0
        for row, made, picture, entry in zip(rows, stepped, pictures, entries, strict=True):
            if row.step_cache is not None:
                skipped += made.skipped
                computed += len(row.inputs.prompts) * depth - made.skipped
            if row.key in poisoned:
                continue
            if picture is not None and (at := row.next_preview) is not None:
                previews.append(RowPreview(row.key, row.step + 1, row.steps, at, picture.cpu().numpy()))
            learning = plan.learning.get(row.key)
            advanced.append(
                row.advanced(
                    made.latent,
                    made.memory,
                    made.generator,
                    entry=entry,
                    corrections=None if learning is None else tuple([each.correction() for each in learning]),
                    cached=made.cached,
                )
            )
        return StepReport(
            began,
            self._clock(),
            tuple(advanced),
            tuple([FailedRow(row, RowPoisoned()) for row in poisoned.values()]),
            sample,
            tuple(previews),
            StepCacheCounters(computed_blocks=computed, skipped_blocks=skipped),
        )

    def _made(self, rows: tuple[Row, ...]) -> tuple[list[RowOutput], StepPlan, float]:
        """Return what a step makes of `rows`, its plan, and when its forward was assembled."""
        known: dict[int, TaylorExpansion] = {}
        for index, row in enumerate(rows):
            if row.step_cache and (found := extrapolated(row, learns=self._learns)) is not None:
                known[index] = found
        if not known:
            return self._computed(rows)
        others = tuple(rows[index] for index in known)
        assembly = self.placing.of(others, computes=False)
        stepped = extrapolated_step(self.family, assembly, others, list(known.values()))
        results, plan, assembled = dict(zip(known, stepped, strict=True)), StepPlan(), self._clock()
        computed = [index for index in range(len(rows)) if index not in known]
        if computed:
            made, plan, assembled = self._computed(tuple(rows[index] for index in computed))
            results |= dict(zip(computed, made, strict=True))
        if plan.sample is not None:
            skipped = plan.sample.skipped_blocks + sum(each.skipped for each in stepped)
            plan = replace(plan, sample=plan.sample.model_copy(update={"skipped_blocks": skipped}))
        return [results[index] for index in range(len(rows))], plan, assembled

    def _computed(self, rows: tuple[Row, ...]) -> tuple[list[RowOutput], StepPlan, float]:
        """:meth:`_made` of rows that the network computes."""
        assembly = self.placing.of(rows)
        assembled = self._clock()
        plan = self.sources.step(rows)
        self._waits.total_s = 0.0
        uses = with_low_ranks(plan.uses, rows, assembly.low_ranks)
        uses = self._controls.add(rows, uses, self._control_waits)
        stepped = denoise_step(self.family, assembly, rows, uses, self._trace)
        return stepped, plan, assembled

    def _hosted(self, rows: Sequence[Row], plan: StepPlan) -> list[Entry | None]:
        """What the step has left behind of each row, on its way to host memory; that of a row that ends is there."""
        entries: list[Entry | None] = []
        for row in rows:
            recorder = plan.recording.get(row.key)
            entry = None if recorder is None else self.hosting.take(recorder.kept())
            entries.append(entry)
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
        poisoned = {}
        for row in rows if self._unread else ():
            unread = self._unread.pop(row.key, None)
            if (
                unread is not None
                and unread.before.inputs is row.inputs  # else another row of its name
                and not unread.verdict.read()[unread.place]
            ):
                poisoned[row.key] = unread.before
        if given.verdict.late and not leaves:
            self._given = given
            for place, row in enumerate(rows):
                self._unread[row.key] = _UnreadFiniteCheck(row, given.verdict, place)
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
        return given.sample.model_copy(update={**given.measured, "step_ms": step_ms})
