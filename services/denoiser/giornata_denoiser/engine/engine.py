"""The engine: one step for all running rows, synchronous and without IO.

A step has three parts, so that the thread which owns the engine holds its lock only around the short ones:
:meth:`Engine.plan` decides, :meth:`Engine.compute` computes, :meth:`Engine.settle` takes the results in. Rows
are values: a row that is cancelled while a step runs is no longer there when the results arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from giornata.packed.tracing import UNTRACED, Lane, Tracing
from giornata.scheduling.batch import Batch, Capacity, Joining, RowKey
from giornata.wire.errors import GiornataError, InternalError, RowPoisoned
from giornata_denoiser.blocks.recording import EntryRecorder
from giornata_denoiser.blocks.slabs import Waits
from giornata_denoiser.engine.assembly import Assembly, DeviceInputs, assemble, place
from giornata_denoiser.engine.protocol import FailedRow, RowPreview, StepReport
from giornata_denoiser.engine.shortage import MemoryLimit
from giornata_denoiser.engine.sources import ReuseOptions, Sources, StepPlan
from giornata_denoiser.engine.stepping import Stepped, denoise_step
from giornata_denoiser.engine.weighing import Budget
from giornata_denoiser.families.preview_map import PreviewMap
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.rows.row import Row


class Engine:
    """Continuous batching over one checkpoint. Not thread-safe; :mod:`giornata_denoiser.engine.loop` makes it so.

    `capacity` limits a step by counts, `budget` by predicted time and memory; `clock` gives monotonic seconds. Rows are
    shown where there is a preview map.
    """

    def __init__(
        self,
        family: ModelFamily,
        capacity: Capacity,
        clock: Callable[[], float],
        preview_map: PreviewMap | None = None,
        *,
        budget: Budget | None = None,
        joining: Joining = Joining.STEP,
        reusing: ReuseOptions | None = None,
        trace: Tracing = UNTRACED,
    ) -> None:
        self.family = family
        self._preview_map = preview_map
        how = reusing or ReuseOptions()
        limit = replace(
            budget or Budget(),
            ahead_bytes=0 if how.loader is None else how.ahead_bytes,
            correction_bits=how.correction_bits,
        )
        self._model = how.model
        self._memory = MemoryLimit(limit, family)
        self._ran_out = False
        """Whether running rows may be more than fit, since the limit has been lowered."""
        self.batch: Batch[Row] = Batch(
            capacity, lambda rows: self._memory.fits(rows, how.model.costs), joining
        )
        self._clock, self._trace = clock, trace
        self._placed: dict[RowKey, DeviceInputs] = {}
        self._assembled: tuple[tuple[Row, ...], Assembly] | None = None
        self._waits = Waits(clock)
        self._sources = Sources(family, how, self._waits, trace)

    def step(self) -> StepReport | None:
        """One step for all running rows; None when there is nothing to do."""
        rows = self.plan()
        return self.settle(self.compute(rows)) if rows else None

    def plan(self) -> tuple[Row, ...]:
        """Let waiting rows join and return the rows of this step.

        After a step that ran out of memory, rows beyond the lower limit wait again, first in the line.
        """
        if self._ran_out:
            self.batch.set_aside()
            self._ran_out = False
        rows = self.batch.admit()
        keys = {row.key for row in (*self.batch.running, *self.batch.background)}
        self._sources.retain(keys)
        for key in self._placed.keys() - keys:
            del self._placed[key]
        if not rows:
            self._assembled = None
        return rows

    def rest(self) -> None:
        """Give back what steps have kept for rows: slabs, inputs, assembly. Rows that go on have theirs made again."""
        self._sources.rest()
        self._placed.clear()
        self._assembled = None

    def compute(self, rows: tuple[Row, ...]) -> StepReport:
        """One step of `rows`; changes nothing but what is kept for the next one.

        If the step raises, every row is computed alone: the culprit fails, the others do not notice. If memory was out,
        what is kept for rows is given back before, and later steps take fewer rows.

        Raises:
            torch.AcceleratorError: the device itself is lost, and no row can be blamed.
        """
        began = self._clock()
        try:
            with self._trace.span(Lane.STEP, f"{len(rows)} rows"):
                return self._forward(rows)
        except torch.AcceleratorError:
            raise
        except Exception as error:  # noqa: BLE001 - a row's edge: the row is answered with it, and the service logs it
            if len(rows) == 1 and rows[0].template is None:
                return StepReport(began, self._clock(), failed=(FailedRow(rows[0], _row_error(error)),))
            out_of_memory = isinstance(error, torch.OutOfMemoryError)
        # Outside of the handler, since the traceback keeps the tensors of the failed step alive.
        if out_of_memory:
            if len(rows) > 1:
                self._memory.ran_out(rows)
                self._ran_out = True
            self.rest()
            if self.family.device.type == "cuda":
                torch.cuda.empty_cache()
        if len(rows) == 1:  # a template is never the reason of a failure
            return self.compute((replace(rows[0], template=None),))
        parts = [self.compute((row,)) for row in rows]
        return StepReport(
            began,
            self._clock(),
            advanced=tuple(row for part in parts for row in part.advanced),
            failed=tuple(failure for part in parts for failure in part.failed),
            previews=tuple(preview for part in parts for preview in part.previews),
        )

    def settle(self, report: StepReport) -> StepReport:
        """Take in what :meth:`compute` reported, without the rows that were cancelled meanwhile."""
        if not self._ran_out:
            self._memory.went_well()
        advanced = tuple(row for row in report.advanced if row.key in self.batch)
        failed = tuple(failure for failure in report.failed if failure.row.key in self.batch)
        left = [row.key for row in advanced if row.done] + [failure.row.key for failure in failed]
        self.batch.settle(advanced, left)
        alive = {row.key for row in advanced}
        previews = tuple(preview for preview in report.previews if preview.key in alive)
        return replace(report, advanced=advanced, failed=failed, previews=previews)

    def _forward(self, rows: tuple[Row, ...]) -> StepReport:
        began = self._clock()
        show, network = self._preview_map, self.family.network
        with torch.inference_mode():
            assembly = self._assembly_of(rows)
            assembled = self._clock()
            plan = self._sources.step(rows)
            self._waits.total_s = 0.0
            stepped = denoise_step(self.family, assembly, rows, plan.uses, self._trace)
            # (height, width, 3) uint8 on the device, of the rows that are shown after this step.
            pictures = [
                None if clean is None or show is None else show(network.unpacked(clean, row.grid))
                for row, clean in zip(rows, stepped.clean, strict=True)
            ]
            # This waits for the device.
            finite = torch.stack([latent.isfinite().all() for latent in stepped.latents]).tolist()
        ended = self._clock()
        step_ms = (ended - began) * 1e3
        if not plan.sample.loaded_bytes:  # else part of it was waiting
            self._model.observe_step(plan.work, step_ms)
        measured = {
            "assemble_ms": (assembled - began) * 1e3,
            "step_ms": step_ms,
            "waited_ms": self._waits.total_s * 1e3,
        }
        return StepReport(
            began,
            ended,
            _advanced(rows, plan, stepped, finite),
            tuple(FailedRow(row, RowPoisoned()) for row, good in zip(rows, finite, strict=True) if not good),
            plan.sample.model_copy(update=measured),
            _previews(rows, pictures),
        )

    def _assembly_of(self, rows: tuple[Row, ...]) -> Assembly:
        """The assembly of `rows`: that of the last step while no row joined or left."""
        if self._assembled and _same_inputs(self._assembled[0], rows):
            return self._assembled[1]
        self._assembled = None  # freed before the next is made
        assembly = assemble(self.family, rows, [self._placed_row(row) for row in rows])
        self._assembled = (rows, assembly)
        return assembly

    def _placed_row(self, row: Row) -> DeviceInputs:
        """The inputs of `row` on the device, copied unless they are there."""
        placed = self._placed.get(row.key)
        if placed is None or placed.source is not row.conditioning:
            placed = self._placed[row.key] = place(row, self.family.device)
        return placed


def _advanced(
    rows: Sequence[Row], plan: StepPlan, stepped: Stepped, finite: Sequence[bool]
) -> tuple[Row, ...]:
    """The rows after the step, but for those whose latent is not finite."""
    return tuple(
        row.advanced(
            stepped.latents[index],
            stepped.memory[index],
            entry=recorder.entry()
            if isinstance(recorder := plan.uses[index].recorder, EntryRecorder)
            else None,
            corrections=tuple(each.correction() for each in plan.learning[index]) or None,
        )
        for index, row in enumerate(rows)
        if finite[index]
    )


def _previews(rows: Sequence[Row], pictures: Sequence[Tensor | None]) -> tuple[RowPreview, ...]:
    """What `rows`, as they were before the step, are shown as after it."""
    return tuple(
        RowPreview(row.key, row.step + 1, row.steps, index, picture.cpu().numpy())
        for row, picture in zip(rows, pictures, strict=True)
        if picture is not None and (index := row.next_preview) is not None
    )


def _same_inputs(before: Sequence[Row], after: Sequence[Row]) -> bool:
    """Whether the rows differ in latents and steps only: every row is built with conditioning of its own."""
    return len(before) == len(after) and all(
        a.conditioning is b.conditioning for a, b in zip(before, after, strict=True)
    )


def _row_error(cause: Exception) -> GiornataError:
    """How a row that raised when it was computed alone is answered."""
    if isinstance(cause, torch.OutOfMemoryError):
        error: GiornataError = InternalError("The denoiser ran out of memory on this picture.")
    else:
        error = RowPoisoned("The denoiser could not compute this picture.")
    error.__cause__ = cause
    return error
