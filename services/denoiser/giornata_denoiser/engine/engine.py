"""The engine: one step for all running rows, synchronous and without IO.

A step has three parts, so that the thread which owns the engine holds its lock only around the short ones:
:meth:`Engine.plan` decides, :meth:`Engine.compute` computes, :meth:`Engine.settle` takes the results in. Rows
are values: a row that is cancelled while a step runs is no longer there when the results arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from giornata.packed.tracing import UNTRACED, LaneTracer
from giornata.scheduling.batch import BatchingMode, Capacity, RowBatch
from giornata_denoiser.engine.checks import Judge
from giornata_denoiser.engine.computing import ModelRunner
from giornata_denoiser.engine.controls import ControlExecutor
from giornata_denoiser.engine.low_ranks import LowRanks, by_set
from giornata_denoiser.engine.protocol import StepReport
from giornata_denoiser.engine.shortage import MemoryLimit
from giornata_denoiser.engine.sources import ReuseOptions
from giornata_denoiser.engine.weighing import StepBudget
from giornata_denoiser.families.preview_map import PreviewMap
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.rows.row import Row


class Engine:
    """Continuous batching over one checkpoint. Not thread-safe; :mod:`giornata_denoiser.engine.loop` makes it so.

    `judge` tells whether what steps make is finite; by default as the family's device can.

    `capacity` limits a step by counts, `budget` by predicted time and memory; `clock` gives monotonic seconds. Rows are
    shown where there is a preview map. `low_ranks` holds the LoRAs of rows; `controls` computes what ControlNets add.
    """

    def __init__(
        self,
        family: ModelFamily,
        capacity: Capacity,
        clock: Callable[[], float],
        preview_map: PreviewMap | None = None,
        *,
        budget: StepBudget | None = None,
        joining: BatchingMode = BatchingMode.STEP,
        reusing: ReuseOptions | None = None,
        trace: LaneTracer = UNTRACED,
        judge: Judge | None = None,
        low_ranks: LowRanks | None = None,
        controls: ControlExecutor | None = None,
    ) -> None:
        self.family = family
        how = reusing or ReuseOptions()
        limit = replace(
            budget or StepBudget(),
            ahead_bytes=0 if how.loader is None else how.ahead_bytes,
            correction_bits=how.correction_bits,
        )
        self._memory = MemoryLimit(limit, family)
        self._ran_out = False
        """Whether running rows may be more than fit, since the limit has been lowered."""
        self.batch: RowBatch[Row] = RowBatch(
            capacity, lambda rows: self._memory.fits(rows, how.model.costs), joining
        )
        self.computing = ModelRunner(
            family,
            clock,
            preview_map,
            reusing=how,
            trace=trace,
            judge=judge,
            low_ranks=low_ranks,
            controls=controls,
            ran_out=self._shrink,
        )

    def able(self, row: Row) -> Row | None:
        """`row` as it makes its next step; None while it has to wait for its LoRAs, or for its ControlNets."""
        return self.computing.able(row)

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
        joined = {row.key for row in (*self.batch.running, *self.batch.background)}
        present = (*self.batch.running, *self.batch.waiting, *self.batch.background)
        self.computing.retain(joined, present, resting=not rows)
        return by_set(rows)

    def rest(self) -> None:
        """Give back what steps have kept for rows: slabs, inputs, assembly. Rows that go on have theirs made again."""
        self.computing.rest(self.batch.keys)

    def compute(self, rows: tuple[Row, ...]) -> StepReport:
        """One step of `rows`; see :meth:`giornata_denoiser.engine.computing.ModelRunner.compute`."""
        return self.computing.compute(rows)

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

    def _shrink(self, rows: Sequence[Row]) -> None:
        """A step of `rows` did not fit into memory: later ones take fewer."""
        self._memory.ran_out(rows)
        self._ran_out = True
