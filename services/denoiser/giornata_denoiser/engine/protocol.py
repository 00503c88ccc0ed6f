"""The engine's protocol: what the service asks of it, and what it reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from giornata.scheduling.batch import RowKey
from giornata.wire.errors import GiornataError
from giornata.wire.workers import StepCacheCounters, StepSample
from giornata_denoiser.rows.row import Row


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
