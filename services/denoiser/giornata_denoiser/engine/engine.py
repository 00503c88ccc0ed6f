"""The engine: one step for all running rows, without IO; and the thread that owns it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, Self

import structlog

from giornata.packed.packing import UNTRACED, LaneTracer
from giornata.scheduling.batch import BatchingMode, Capacity, RowBatch, RowKey
from giornata_denoiser.engine.batch_tensors import ControlPart, LowRanks, order_by_set
from giornata_denoiser.engine.model_runner import Judge, ModelRunner, StepReport
from giornata_denoiser.engine.step_budget import StepBudget, step_bytes
from giornata_denoiser.engine.step_plan import ReuseOptions
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.families.preview_map import PreviewMap
from giornata_denoiser.rows.row import Row

log = structlog.get_logger(__name__)

STEP: Final = 1 / 8
"""By which share of a step that did not fit the next ones are smaller, and by which the limit rises again."""
CALM: Final = 1000
"""Steps without a shortage after which the limit rises: a step that fails costs its batch about one step a row."""


class MemoryLimit:
    """The budget of an engine's steps, lower for a while after one that ran out of memory.

    It rises again, since the shortage may have been another program's; slowly, since it mostly was not.
    """

    def __init__(self, budget: StepBudget, family: ModelFamily) -> None:
        self._most, self._family = budget, family
        self.budget = budget
        self._calm = 0

    def fits(self, rows: Sequence[Row]) -> bool:
        """Return whether `rows` may share a step now."""
        return step_bytes(rows, self.budget, self._family) <= self.budget.memory_bytes

    def ran_out(self, rows: Sequence[Row]) -> None:
        """A step of `rows` did not fit: later ones take less."""
        needed = step_bytes(rows, self.budget, self._family)
        self._calm = 0
        self._set(min(self.budget.memory_bytes, needed) * (1 - STEP))
        log.warning("step_out_of_memory", rows=len(rows), bytes=needed, limit=self.budget.memory_bytes)

    def went_well(self) -> None:
        """One more step fitted."""
        if self.budget.memory_bytes < self._most.memory_bytes:
            self._calm += 1
            if self._calm >= CALM:
                self._calm = 0
                self._set(self.budget.memory_bytes * (1 + STEP))

    def _set(self, memory_bytes: float) -> None:
        self.budget = replace(self.budget, memory_bytes=min(memory_bytes, self._most.memory_bytes))


@dataclass(frozen=True, eq=False)
class EngineState:
    """The rows an engine has, as of its last step."""

    running: tuple[Row, ...]
    waiting: tuple[Row, ...]
    began_s: float | None = None
    """When the step that is being computed began, by the engine's clock; None while none is."""


class RowEngine(Protocol):
    """Computes rows step by step, and tells of every step in order, in a thread of its own.

    Every method may be called from any thread and answers at once, also while a step runs. Rows are values: a row that
    is dropped while a step runs is missing from that step's report.
    """

    def submit(self, rows: Sequence[Row]) -> bool:
        """Let `rows` join at the next step that has room; False if nothing is taken any more.

        Raises:
            ValueError: a row of this key is here already.
        """

    def resume(self, job_id: str, attempt: int) -> None:
        """The LoRAs of an attempt's rows are loaded, for which they may have been waiting."""

    def cancel(self, job_id: str, attempt: int | None = None) -> tuple[Row, ...]:
        """Drop a job's rows, of one attempt or of all, and return them as of their last step."""

    def take_all(self) -> tuple[Row, ...]:
        """Accept nothing more, drop every row, and return those of edits as of their last step."""

    def state(self) -> EngineState:
        """The rows as of the last step."""


class Engine:
    """Continuous batching over one checkpoint. Not thread-safe: :class:`EngineLoop` makes it so.

    A step has three parts, so that the loop holds its lock around the short ones alone: :meth:`plan` decides,
    `computing` computes, :meth:`settle` takes the results in. Rows that are cancelled meanwhile have left by then.

    `judge` tells whether what steps make is finite; by default as the family's device can.
    `capacity` limits a step by counts, `budget` by memory; `clock` gives monotonic seconds. Rows are
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
        controls: ControlPart | None = None,
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
        self.batch: RowBatch[Row] = RowBatch(capacity, self._memory.fits, joining)
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

    def step(self) -> StepReport | None:
        """One step for all running rows; None when there is nothing to do."""
        rows = self.plan()
        return self.settle(self.computing.compute(rows)) if rows else None

    def plan(self) -> tuple[Row, ...]:
        """Let waiting rows join and return the rows of this step.

        After a step that ran out of memory, rows beyond the lower limit wait again, first in the line.
        """
        if self._ran_out:
            self.batch.set_aside()
            self._ran_out = False
        rows, batch = self.batch.admit(), self.batch
        joined = (*batch.running, *batch.background)
        present = (*joined, *batch.waiting)
        self.computing.retain({row.key for row in joined}, present, resting=not rows)
        return order_by_set(rows)

    def rest(self) -> None:
        """Give back what steps have kept for rows: slabs, inputs, assembly. Rows that go on have theirs made again."""
        self.computing.rest(self.batch.keys)

    def settle(self, report: StepReport) -> StepReport:
        """Take in what the runner has reported, without the rows that were cancelled meanwhile."""
        if not self._ran_out:
            self._memory.went_well()
        here = set(self.batch.keys)
        advanced = [row for row in report.advanced if row.key in here]
        failed = report.failed and tuple(failure for failure in report.failed if failure.row.key in here)
        left = [row.key for row in advanced if row.done] + [failure.row.key for failure in failed]
        self.batch.settle(advanced, left)
        alive = {row.key for row in advanced}
        previews = report.previews and tuple(shown for shown in report.previews if shown.key in alive)
        return replace(report, advanced=tuple(advanced), failed=failed, previews=previews)

    def _shrink(self, rows: Sequence[Row]) -> None:
        """A step of `rows` did not fit into memory: later ones take fewer."""
        self._memory.ran_out(rows)
        self._ran_out = True


class EngineLoop:
    """A :class:`RowEngine`: an :class:`Engine` in a thread of its own, from entering to leaving the context.

    Nothing else may touch the engine from now on. In its thread, `on_report` is told of every step, and `on_crash` that
    the engine has lost its device and cannot go on; its rows can still be taken. Rows whose LoRAs are not loaded wait
    for :meth:`resume`. The lock is held around deciding and settling only: callers wait microseconds, not steps.
    """

    def __init__(
        self,
        engine: Engine,
        on_report: Callable[[StepReport], object],
        on_crash: Callable[[Exception], object],
    ) -> None:
        self._engine, self._on_report, self._on_crash = engine, on_report, on_crash
        self.paused = 0
        """How many rows have waited for LoRAs or ControlNets while others could go on."""
        self._late: frozenset[RowKey] = frozenset()
        """Rows that wait for their adapters, as of the last look."""
        self._began_s: float | None = None
        self._condition = threading.Condition()
        self._accepting = True
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        """Let the running step end, then stop; rows that are left can still be taken."""
        with self._condition:
            self._accepting = False
            self._stopping = True
            self._condition.notify()
        self._thread.join()

    def submit(self, rows: Sequence[Row]) -> bool:
        """See :meth:`RowEngine.submit`."""
        with self._condition:
            if not self._accepting:
                return False
            self._engine.batch.submit(rows)
            self._pause()
            self._condition.notify()
            return True

    def resume(self, job_id: str, attempt: int) -> None:
        """See :meth:`RowEngine.resume`."""
        with self._condition:
            for key in self._engine.batch.keys:
                if (key.job_id, key.attempt) == (job_id, attempt):
                    self._engine.batch.make_ready(key)
            self._condition.notify()

    def cancel(self, job_id: str, attempt: int | None = None) -> tuple[Row, ...]:
        """See :meth:`RowEngine.cancel`."""
        with self._condition:
            return self._engine.batch.cancel(job_id, attempt)

    def take_all(self) -> tuple[Row, ...]:
        """See :meth:`RowEngine.take_all`."""
        with self._condition:
            self._accepting = False
            return self._engine.batch.take_all()

    def state(self) -> EngineState:
        """The rows as of the last step."""
        with self._condition:
            return EngineState(self._engine.batch.running, self._engine.batch.waiting, self._began_s)

    def _run(self) -> None:
        try:
            while rows := self._next():
                self._step(rows)
                del rows  # which would otherwise stay while nothing is to be done
        except Exception as error:  # noqa: BLE001 - the thread's edge: its owner is told
            with self._condition:
                self._accepting = False
            self._on_crash(error)

    def _step(self, rows: tuple[Row, ...]) -> None:
        report = self._engine.computing.compute(rows)
        with self._condition:
            self._began_s = None
            report = self._engine.settle(report)
        self._on_report(report)

    def _next(self) -> tuple[Row, ...]:
        """The rows of the next step, once there are any; none when the loop is to stop."""
        with self._condition:
            if not self._goes_on():
                self._engine.rest()
                self._condition.wait_for(self._goes_on)
            if self._stopping:
                return ()
            self._began_s = time.perf_counter()
            return self._engine.plan()

    def _goes_on(self) -> bool:
        """Return whether there is a row to compute, or the loop is to stop."""
        self._pause()
        return self._stopping or self._engine.batch.able

    def _pause(self) -> None:
        """Let rows wait whose adapters are missing, and LoRAs that have arrived act from the next step on."""
        batch = self._engine.batch
        late: list[RowKey] = []
        for row in (*batch.running, *batch.waiting):
            now = self._engine.computing.able(row)
            if now is None:
                late.append(row.key)
            elif now is not row:
                batch.change(now)
        batch.pause(late)
        self.paused += len(frozenset(late) - self._late)  # others are looked at again, and wait still
        self._late = frozenset(late)
