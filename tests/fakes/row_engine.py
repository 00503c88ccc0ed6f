"""An engine that computes nothing: its rows advance when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from giornata.scheduling.batch import Capacity, RowBatch
from giornata_denoiser.engine.engine import EngineState
from giornata_denoiser.engine.model_runner import StepReport
from giornata_denoiser.rows.row import Row


class SteppedEngine:
    """Satisfies :class:`giornata_denoiser.engine.engine.RowEngine`; every latent stays as it is.

    Args:
        capacity: of one step.
        on_report: told of every step.
    """

    def __init__(
        self, capacity: Capacity, on_report: Callable[[StepReport], object] = lambda _: None
    ) -> None:
        self.batch: RowBatch[Row] = RowBatch(capacity)
        self._on_report = on_report
        self._under_way: tuple[Row, ...] = ()
        self._accepting = True

    def submit(self, rows: Sequence[Row]) -> bool:
        if self._accepting:
            self.batch.submit(rows)
        return self._accepting

    def resume(self, job_id: str, attempt: int) -> None:
        for key in self.batch.keys:
            if (key.job_id, key.attempt) == (job_id, attempt):
                self.batch.make_ready(key)

    def cancel(self, job_id: str, attempt: int | None = None) -> tuple[Row, ...]:
        return self.batch.cancel(job_id, attempt)

    def take_all(self) -> tuple[Row, ...]:
        self._accepting = False
        return self.batch.take_all()

    def state(self) -> EngineState:
        return EngineState(self.batch.running, self.batch.waiting, 0.0 if self._under_way else None)

    def begin(self) -> None:
        """A step begins."""
        self._under_way = self.batch.admit()

    def finish(self) -> None:
        """The step ends and is reported."""
        advanced = tuple(row.advanced(row.latent) for row in self._under_way if row.key in self.batch)
        self._under_way = ()
        self.batch.settle(advanced, [row.key for row in advanced if row.done])
        self._on_report(StepReport(0.0, 1.0, advanced))
