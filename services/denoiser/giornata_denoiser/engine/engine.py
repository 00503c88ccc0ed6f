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
from giornata.wire.workers import StepSample
from giornata_denoiser.blocks.recording import EntryRecorder
from giornata_denoiser.blocks.slabs import Waits
from giornata_denoiser.engine.assembly import Assembly, DeviceInputs, assemble, place
from giornata_denoiser.engine.options import ReuseOptions
from giornata_denoiser.engine.protocol import FailedRow, RowPreview, StepReport
from giornata_denoiser.engine.sources import Sources, StepPlan
from giornata_denoiser.engine.stepping import denoise_step
from giornata_denoiser.engine.weighing import Budget, fits
from giornata_denoiser.families.preview_map import PreviewMap
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.rows.row import Row

Clock = Callable[[], float]
"""Monotonic seconds."""


class Engine:
    """Continuous batching over one checkpoint. Not thread-safe; :mod:`giornata_denoiser.engine.loop` makes it so.

    Args:
        family: computes the rows.
        capacity: of one step, by counts.
        clock: monotonic seconds.
        preview_map: makes pictures of latents; without it no row is shown.
        budget: of one step, by predicted time and memory.
        joining: when waiting rows may join.
        reusing: how templates are taken from.
        trace: told of steps, blocks and loads.
    """

    def __init__(
        self,
        family: ModelFamily,
        capacity: Capacity,
        clock: Clock,
        preview_map: PreviewMap | None = None,
        *,
        budget: Budget | None = None,
        joining: Joining = Joining.STEP,
        reusing: ReuseOptions | None = None,
        trace: Tracing = UNTRACED,
    ) -> None:
        self.family = family
        self._preview_map = preview_map
        how, limit = reusing or ReuseOptions(), budget or Budget()
        self._model = how.model
        self.batch: Batch[Row] = Batch(
            capacity, lambda rows: fits(rows, limit, how.model.costs, family), joining
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
        """Let waiting rows join and return the rows of this step."""
        rows = self.batch.admit()
        keys = self.batch.keys
        self._sources.retain(keys)
        for key in self._placed.keys() - keys:
            del self._placed[key]
        if not rows:
            self._assembled = None
        return rows

    def compute(self, rows: tuple[Row, ...]) -> StepReport:
        """One step of `rows`; changes nothing but the cached assembly.

        If the step raises, every row is computed alone: the culprit fails, the others do not notice.

        Raises:
            torch.AcceleratorError: the device itself is lost, and no row can be blamed.
        """
        began = self._clock()
        outcome = self._attempt(rows)
        if isinstance(outcome, StepReport):
            return outcome
        if len(rows) == 1 and rows[0].template is not None:  # a template is never the reason of a failure
            return self.compute((replace(rows[0], template=None),))
        if len(rows) == 1:
            return StepReport(began, self._clock(), failed=(FailedRow(rows[0], _row_error(outcome)),))
        del outcome  # its traceback keeps the tensors of the failed step alive
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
        advanced = tuple(row for row in report.advanced if row.key in self.batch)
        failed = tuple(failure for failure in report.failed if failure.row.key in self.batch)
        left = [row.key for row in advanced if row.done] + [failure.row.key for failure in failed]
        self.batch.settle(advanced, left)
        alive = {row.key for row in advanced}
        previews = tuple(preview for preview in report.previews if preview.key in alive)
        return replace(report, advanced=advanced, failed=failed, previews=previews)

    def _attempt(self, rows: tuple[Row, ...]) -> StepReport | Exception:
        try:
            with self._trace.span(Lane.STEP, f"{len(rows)} rows"):
                return self._forward(rows)
        except torch.AcceleratorError:
            raise
        except Exception as error:  # noqa: BLE001 - a row's edge: the row is answered with it, and the service logs it
            return error

    def _forward(self, rows: tuple[Row, ...]) -> StepReport:
        began = self._clock()
        with torch.inference_mode():
            assembly = self._assembly_of(rows)
            assembled = self._clock()
            plan = self._sources.step(rows)
            self._waits.reset()
            stepped = denoise_step(self.family, assembly, rows, plan.uses, self._trace)
            pictures = self._pictures(rows, stepped.clean)
            finite = torch.stack(
                [latent.isfinite().all() for latent in stepped.latents]
            ).tolist()  # waits for the device
        ended = self._clock()
        uses = plan.uses[: len(rows)]
        entries = [use.recorder.entry() if isinstance(use.recorder, EntryRecorder) else None for use in uses]
        advanced = [
            row.advanced(latent, entry, memory)
            for row, latent, entry, memory, good in zip(
                rows, stepped.latents, entries, stepped.memory, finite, strict=True
            )
            if good
        ]
        poisoned = [FailedRow(row, RowPoisoned()) for row, good in zip(rows, finite, strict=True) if not good]
        previews = [
            _preview(row, picture) for row, picture in zip(rows, pictures, strict=True) if picture is not None
        ]
        if not plan.missing_bytes:  # else part of it was waiting
            self._model.observe_step(plan.work, (ended - began) * 1e3)
        sample = step_sample(
            rows,
            plan,
            self.family.depth,
            assemble_ms=(assembled - began) * 1e3,
            step_ms=(ended - began) * 1e3,
            waited_ms=self._waits.total_s * 1e3,
        )
        return StepReport(began, ended, tuple(advanced), tuple(poisoned), sample, tuple(previews))

    def _pictures(self, rows: tuple[Row, ...], clean: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """(height, width, 3) uint8 on the device, of the rows that are shown after this step."""
        show = self._preview_map
        return [
            None if latent is None or show is None else show(self.family.network.unpacked(latent, row.grid))
            for row, latent in zip(rows, clean, strict=True)
        ]

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


def _preview(row: Row, picture: Tensor) -> RowPreview:
    """What `row`, as it was before the step, is shown as after it."""
    index = row.next_preview
    if index is None:
        raise ValueError(f"no preview follows step {row.step + 1} of {row.key}")
    return RowPreview(row.key, row.step + 1, row.steps, index, picture.cpu().numpy())


def step_sample(
    rows: Sequence[Row], plan: StepPlan, blocks: int, *, assemble_ms: float, step_ms: float, waited_ms: float
) -> StepSample:
    """What a step of `rows` computed, for the router's regressions; tokens and pairs are means over its blocks."""
    work = plan.work
    text_tokens = sum(row.text_tokens for row in rows)
    return StepSample(
        rows=len(rows),
        sequences=round(work.sequences / blocks),
        image_tokens=round(work.tokens / blocks) - text_tokens,
        text_tokens=text_tokens,
        projected_tokens=round(work.projected / blocks),
        attention_pairs=round(work.pairs / blocks),
        loaded_bytes=plan.missing_bytes,
        assemble_ms=assemble_ms,
        step_ms=step_ms,
        waited_ms=waited_ms,
        predicted_ms=plan.predicted_ms,
        reusing_ms=plan.reusing_ms,
        excess_ms=plan.excess_ms,
    )


def _same_inputs(before: Sequence[Row], after: Sequence[Row]) -> bool:
    """Whether the rows differ in latents and steps only: every row is built with conditioning of its own."""
    return len(before) == len(after) and all(
        a.conditioning is b.conditioning for a, b in zip(before, after, strict=True)
    )


def _row_error(cause: Exception) -> GiornataError:
    """How a row that raised when it was computed alone is answered."""
    error: GiornataError
    if isinstance(cause, torch.OutOfMemoryError):
        error = InternalError("The denoiser ran out of memory on this picture.")
    else:
        error = RowPoisoned("The denoiser could not compute this picture.")
    error.__cause__ = cause
    return error
